"""The backend that really runs a pipeline: stage processes, models, drafters, calibration."""
