"""What runs where; ordered start and stop."""
