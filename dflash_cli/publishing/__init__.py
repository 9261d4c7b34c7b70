"""Reports, model-card sections and exports of measured acceptance."""
