DROP TABLE whatsapp_sessions;
