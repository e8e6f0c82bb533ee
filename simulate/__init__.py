"""The discrete-event simulator of pipelines, forecasts and timelines."""
