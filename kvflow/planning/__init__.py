"""Plan transfers between two cache layouts. Pure.

``match`` pairs components. ``runs`` cuts and merges contiguous copies. ``certificate`` proves them. ``plan`` combines
these steps and caches plans. ``staging`` decides whether to read through a buffer;
``strided_copies`` folds the copies out of it. ``assignment`` divides a target among source ranks. For each pull,
``pairs`` pairs units of blocks, ``bind`` turns pairs into descriptor indices, and ``chunks`` cuts these. ``reasons``
explains a plan.
"""
