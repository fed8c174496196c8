"""What verbs look at and open before they start something: mistakes that show, settings to go on with, a server."""
