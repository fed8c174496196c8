"""What a workflow talks to: conversations in, recorded tokens out."""
