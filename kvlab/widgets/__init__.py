"""Live controls and pictures for notebooks and dashboards; all that they show is held in traits."""
