"""What a process tells about itself: logs, waits, traces, and the exporters of numbers."""
