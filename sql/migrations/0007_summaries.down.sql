DROP VIEW contact_metrics_summary_v;
DROP TABLE stream_dead_letter;
DROP TABLE stream_seen_event;
DROP TABLE stream_offset;
DROP TABLE contact_metrics_summary_currency;
DROP TABLE contact_metrics_summary;
DROP TABLE stream_generation;
