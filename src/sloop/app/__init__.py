"""What a user declares: applications, scenarios, and the kinds of hardware they run on."""
