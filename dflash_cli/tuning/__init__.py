"""What K a draft should be served with, and whether at all."""
