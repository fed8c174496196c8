"""Starting a run's processes and keeping them alive.

    run directory -> broker -> streams -> controller, node, trainer ranks -> the controller ends -> all are stopped

``backend`` is the seam to where processes run; ``supervisor`` decides which live, on any backend.
"""
