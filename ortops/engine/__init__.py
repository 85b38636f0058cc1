"""What lowers, builds and runs training steps."""
