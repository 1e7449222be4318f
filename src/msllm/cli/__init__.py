"""TALK: the commands. They parse, validate, call the engine and render; no work is done here."""
