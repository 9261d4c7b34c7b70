"""The bridge between the two wings: alternative readings of a draft, tried on a running pair."""
