"""What an organization has done by itself: when it begins (`definition`), for whom (`conditions`), and what is done
(`steps`), by runs that are kept (`runs`). `automation-worker` and `automation-call-worker` carry it out.

Without I/O: `definition`, `conditions`, `text`, `times`, `guard`. With Postgres: `facts`, `steps`, `runs`, `schedules`,
`calls`, `outcomes`; `book` is what people do with automations.
"""
