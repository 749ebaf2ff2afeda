"""One small working example of everything that a run can plug in by import path. See docs/plugins.md."""
