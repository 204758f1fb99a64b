"""The demonstration: a real model under a wave of bursts, `static` beside `sponge`, live and then simulated.

Read in this order: `setting` (what is asked of this machine), `live` (a server under load), `page` (what came of it).
"""
