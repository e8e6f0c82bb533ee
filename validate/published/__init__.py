"""``pipespec validate published``: predict the published PipeSpec runs from their greedy and synchronous files.

files → bits → calibration → replay → rows → report, one module each.  Never imports torch.
"""
