"""The declarations of a user: applications, scenarios, and their hardware."""
