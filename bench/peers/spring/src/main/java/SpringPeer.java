import com.fasterxml.jackson.core.JsonFactory;
import com.fasterxml.jackson.core.JsonGenerator;
import com.zaxxer.hikari.HikariConfig;
import com.zaxxer.hikari.HikariDataSource;
import java.io.File;
import java.io.IOException;
import java.io.StringWriter;
import java.io.UncheckedIOException;
import java.sql.Array;
import java.sql.PreparedStatement;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.DecoderFactory;
import org.apache.kafka.clients.consumer.Consumer;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.springframework.jdbc.core.JdbcTemplate;
import org.springframework.jdbc.datasource.DataSourceTransactionManager;
import org.springframework.kafka.core.DefaultKafkaConsumerFactory;
import org.springframework.kafka.listener.BatchMessageListener;
import org.springframework.kafka.listener.ConcurrentMessageListenerContainer;
import org.springframework.kafka.listener.ConsumerAwareRebalanceListener;
import org.springframework.kafka.listener.ContainerProperties;
import org.springframework.transaction.support.TransactionTemplate;

/**
 * Spring Kafka's batch listener: 500 records, their idempotency and effect rows in one transaction, then the offsets.
 *
 * <p>PEER_THREADS listeners. PEER_SQL says how the rows get there: `json` (one parameter) or `unnest` (four arrays).
 */
public final class SpringPeer {
    private static final int FRAMING_BYTES = 5;
    private static final String WRITE =
            " INSERT INTO bench_inbox (worker, event_id) SELECT 'spring', event_id FROM input ON CONFLICT DO NOTHING"
                    + " RETURNING event_id"
                    + ") INSERT INTO bench_effect (event_id, organization_id, contact_id, body)"
                    + " SELECT event_id, organization_id, contact_id, body FROM input JOIN fresh USING (event_id)";
    private static final String BY_JSON =
            "WITH input AS (SELECT * FROM jsonb_to_recordset(?::jsonb)"
                    + " AS input (event_id uuid, organization_id uuid, contact_id text, body text)), fresh AS ("
                    + WRITE;
    private static final String BY_UNNEST =
            "WITH input AS (SELECT * FROM unnest(?::uuid[], ?::uuid[], ?::text[], ?::text[])"
                    + " AS input (event_id, organization_id, contact_id, body)), fresh AS ("
                    + WRITE;

    private final Schema schema;
    private final JdbcTemplate database;
    private final TransactionTemplate transaction;
    private final boolean unnest;
    private final JsonFactory json = new JsonFactory();
    private final ThreadLocal<GenericDatumReader<GenericRecord>> readers;

    private SpringPeer(HikariDataSource source, Schema schema, boolean unnest) {
        this.schema = schema;
        this.database = new JdbcTemplate(source);
        this.transaction = new TransactionTemplate(new DataSourceTransactionManager(source));
        this.unnest = unnest;
        this.readers = ThreadLocal.withInitial(() -> new GenericDatumReader<>(this.schema));
    }

    public static void main(String[] arguments) throws Exception {
        Map<String, String> given = System.getenv();
        int threads = Integer.parseInt(given.get("PEER_THREADS"));
        HikariConfig pool = new HikariConfig();
        pool.setJdbcUrl(given.get("PEER_JDBC_URL"));
        pool.setUsername(given.get("PEER_DATABASE_USER"));
        pool.setPassword(given.get("PEER_DATABASE_PASSWORD"));
        pool.setMaximumPoolSize(threads);
        HikariDataSource source = new HikariDataSource(pool);
        Schema schema = new Schema.Parser().parse(new File(given.get("PEER_SCHEMA")));
        SpringPeer peer = new SpringPeer(source, schema, "unnest".equals(given.get("PEER_SQL")));

        ContainerProperties properties = new ContainerProperties(given.get("PEER_TOPIC"));
        properties.setMessageListener((BatchMessageListener<String, byte[]>) peer::handle);
        properties.setConsumerRebalanceListener(new Ready());
        var container =
                new ConcurrentMessageListenerContainer<>(
                        new DefaultKafkaConsumerFactory<>(
                                Map.<String, Object>of(
                                        ConsumerConfig.BOOTSTRAP_SERVERS_CONFIG, given.get("PEER_BOOTSTRAP_SERVERS"),
                                        ConsumerConfig.GROUP_ID_CONFIG, given.get("PEER_GROUP"),
                                        ConsumerConfig.AUTO_OFFSET_RESET_CONFIG, "earliest",
                                        ConsumerConfig.ISOLATION_LEVEL_CONFIG, "read_committed",
                                        ConsumerConfig.MAX_POLL_RECORDS_CONFIG, 500),
                                new StringDeserializer(),
                                new ByteArrayDeserializer()),
                        properties);
        container.setConcurrency(threads);
        container.start();
        CountDownLatch ended = new CountDownLatch(1);
        Runtime.getRuntime()
                .addShutdownHook(
                        new Thread(
                                () -> {
                                    container.stop();
                                    source.close();
                                    ended.countDown();
                                }));
        ended.await();
    }

    private void handle(List<ConsumerRecord<String, byte[]>> records) {
        List<GenericRecord> events = records.stream().map(this::decode).toList();
        transaction.executeWithoutResult(status -> write(events));
    }

    private GenericRecord decode(ConsumerRecord<String, byte[]> record) {
        byte[] value = record.value();
        try {
            var decoder = DecoderFactory.get().binaryDecoder(value, FRAMING_BYTES, value.length - FRAMING_BYTES, null);
            return readers.get().read(null, decoder);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private void write(List<GenericRecord> events) {
        if (!unnest) {
            database.update(BY_JSON, asJson(events));
            return;
        }
        database.update(
                connection -> {
                    PreparedStatement statement = connection.prepareStatement(BY_UNNEST);
                    int size = events.size();
                    UUID[] ids = new UUID[size];
                    UUID[] organizations = new UUID[size];
                    String[] contacts = new String[size];
                    String[] bodies = new String[size];
                    for (int i = 0; i < size; i++) {
                        GenericRecord event = events.get(i);
                        GenericRecord payload = (GenericRecord) event.get("payload");
                        ids[i] = UUID.fromString(event.get("id").toString());
                        organizations[i] = UUID.fromString(event.get("organization_id").toString());
                        contacts[i] = payload.get("contact_id").toString();
                        bodies[i] = payload.get("body").toString();
                    }
                    Array[] columns = {
                        connection.createArrayOf("uuid", ids),
                        connection.createArrayOf("uuid", organizations),
                        connection.createArrayOf("text", contacts),
                        connection.createArrayOf("text", bodies)
                    };
                    for (int i = 0; i < columns.length; i++) {
                        statement.setArray(i + 1, columns[i]);
                    }
                    return statement;
                });
    }

    private String asJson(List<GenericRecord> events) {
        StringWriter text = new StringWriter(256 * events.size());
        try (JsonGenerator out = json.createGenerator(text)) {
            out.writeStartArray();
            for (GenericRecord event : events) {
                GenericRecord payload = (GenericRecord) event.get("payload");
                out.writeStartObject();
                out.writeStringField("event_id", event.get("id").toString());
                out.writeStringField("organization_id", event.get("organization_id").toString());
                out.writeStringField("contact_id", payload.get("contact_id").toString());
                out.writeStringField("body", payload.get("body").toString());
                out.writeEndObject();
            }
            out.writeEndArray();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        return text.toString();
    }

    /** Says once that there are partitions. */
    private static final class Ready implements ConsumerAwareRebalanceListener {
        private final AtomicBoolean said = new AtomicBoolean();

        @Override
        public void onPartitionsAssigned(Consumer<?, ?> consumer, Collection<TopicPartition> partitions) {
            if (!partitions.isEmpty() && said.compareAndSet(false, true)) {
                Instant now = Instant.now().truncatedTo(ChronoUnit.MILLIS);
                System.out.println("{\"event\": \"peer.ready\", \"timestamp\": \"" + now + "\"}");
            }
        }
    }
}
