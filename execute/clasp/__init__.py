"""CLaSp: a drafter that is the target with layers skipped, chosen anew as the text goes on."""
