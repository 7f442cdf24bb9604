"""Values that processes and people read: JSON of declared types, messages, and the entries of files.

json_reader       JSON that somebody else may have written, as values of declared types
wire              values between processes as bytes, checked against an annotation
run_records       entries of a run directory's files; metrics_file: metrics.jsonl as it grows
rank_records      a rank's state, and why one failed
rehearsal_record  the measurements of one rehearsed rank
step_lines        a step as a line of output
"""
