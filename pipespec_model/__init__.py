"""The shared vocabulary: specs, latency and acceptance models, profiles, traces, the protocol of a stage, and
the closed forms.  Imports none of the other packages."""
