"""What only drafts compute: convolutions, walks over candidates, and trees."""
