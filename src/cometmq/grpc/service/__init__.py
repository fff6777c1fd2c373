"""The RPCs of 5.x clients over the broker of this process."""
