"""AsyFunc (submission to SoCC 2023): replicas of the whole model for the mean rate, shadows of layers for bursts."""
