"""How the processes of the run fare: what they report, and who has not been heard for too long."""
