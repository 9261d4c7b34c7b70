"""What a user typed -> files and headers; writing safetensors. Nothing about dialects."""
