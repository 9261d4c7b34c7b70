"""Questions that the probe asks beside the measured prompts, one file per question."""
