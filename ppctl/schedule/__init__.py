"""Schedules as values: actions, policies, passes, verification, simulation, drawing.

action           the value: actions, channels, Schedule
policies         every schedule as a function, with zero_bubble and schedule_table
passes           lowering: messages, gradient sums, capacities; batching, by rounds that repeat
executor         how lists of actions run
verify           proof that a schedule is complete, ordered and free of deadlock, with pairs
simulate, trace  a schedule and costs in, a trace out; compare sets all policies side by side
order_search     finds a schedule for given costs and memory: lane_orders, list_scheduler
sync_events      when gradients may be communicated, and which microbatches are recomputed
measured_step    a traced step of all ranks, also with a stage faster or slower
picture          what is drawn, by text_timeline and drawings (HTML, Perfetto)
"""
