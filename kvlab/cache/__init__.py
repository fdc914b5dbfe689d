"""The caches: who owns which slot. numpy at most; no torch, no clock, no widget."""
