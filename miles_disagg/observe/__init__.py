"""Metrics, trackers, events and the console: every metric is declared once."""
