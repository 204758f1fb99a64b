"""Reports: folds over the event log. Metrics, tables, plots, HTML, `explain`, and the reproductions of publications."""
