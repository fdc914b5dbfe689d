"""The live model: the only room that imports torch."""
