"""Pictures: pure functions from state and records to plotly figures."""
