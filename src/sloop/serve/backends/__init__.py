"""Where workers run: processes on this machine (`local`); a Ray cluster later."""
