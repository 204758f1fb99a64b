"""The page: what people look at while a server runs, and the report of a run that is over.

A process of its own reads the event log as it grows (`sloop.page.process`), so the deciding process does nothing for
it, however many people look. `picture` is what a page shows, as plain values: a whole once, then what has changed each
second. `listener` answers browsers. `report` puts the same page and the values of a recorded run into one file. The
browser's part is in `static`.
"""
