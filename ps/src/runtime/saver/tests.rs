//! Saves, searches that are shared, and what is not saved again.

use pushpull_common::identity::Identity;
use pushpull_common::ids::{ShardId, TaskId};
use pushpull_common::protocol::wire::Text;
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::checkpoint::Retention;
use crate::checkpoint::tests::gate::Gate;
use crate::optimizer::{OptimizerRules, Sgd};
use crate::peer_hello::PeerHello;

/// Ends a hang.
const LONG: Duration = Duration::from_secs(60);

/// A saver's desk, and the other ends of its channels.
struct Office {
    orders: mpsc::Sender<SaverOrder>,
    news: mpsc::Receiver<SaverEvent>,
    _wishes: mpsc::Sender<Wish>,
    gate: Gate,
    catalogue: Arc<Catalogue>,
}

impl Office {
    /// For shards that are reached, or are not, at these addresses.
    fn new(addresses: impl IntoIterator<Item = String>) -> (Office, Desk) {
        let (gate, catalogue) = Gate::of_a_checkpoint();
        let (orders, ordered) = mpsc::channel(64);
        let (tell, news) = mpsc::channel(64);
        let (wishes, wished) = mpsc::channel(1);
        let publisher = Publisher {
            storage: Arc::new(gate.clone()),
            retention: Retention::default(),
            peer_hello: PeerHello { task: TaskId::ps(0), identity: Identity::new() },
            addresses: (0..).zip(addresses).collect(),
            rules: OptimizerRules::new(Arc::new(Sgd::new(1.0))),
            owner: ShardId { task: 0, shard: 0 },
        };
        let reader_slot = Desk::new(Saver {
            publisher: Arc::new(publisher),
            every: None,
            counters: Arc::default(),
            record: watch::channel(SaveRecord::default()).0,
            note: None,
            events: EventSink::default(),
            orders: ordered,
            wishes: wished,
            news: tell,
            abandon_flag: AbandonFlag::default(),
            stop: CancellationToken::new(),
        });
        (Office { orders, news, _wishes: wishes, gate, catalogue }, reader_slot)
    }

    fn order(&self, ticket: u64, epoch: u32, step: u64) -> SaverOrder {
        let (epoch, step) = (RestoreEpoch(epoch), GlobalStep(step));
        let (requester, catalogue) = (SaveRequester::Ticket(ticket), self.catalogue.clone());
        SaverOrder::Save { requester, user: Vec::new(), catalogue, epoch, step }
    }

    async fn save(&self, ticket: u64) {
        self.orders.send(self.order(ticket, 1, 10)).await.unwrap();
    }

    async fn find(&self, connection: u64) {
        let order = SaverOrder::Find { connection, request: Envelope::default() };
        self.orders.send(order).await.unwrap();
    }

    async fn news(&mut self) -> SaverEvent {
        tokio::time::timeout(LONG, self.news.recv()).await.expect("news comes").unwrap()
    }

    async fn saved(&mut self) -> (SaveRequester, String) {
        match self.news().await {
            SaverEvent::Saved { requester, result: Err(error) } => (requester, error),
            other => panic!("{other:?}"),
        }
    }

    /// The connection that is answered, and what was found.
    async fn found(&mut self) -> (u64, Option<String>) {
        match self.news().await {
            SaverEvent::Found { connection, result: Ok(found), .. } => {
                (connection, found.map(|id| id.name.as_str().to_owned()))
            }
            other => panic!("{other:?}"),
        }
    }
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

async fn accept(listener: &TcpListener) -> TcpStream {
    tokio::time::timeout(LONG, listener.accept()).await.expect("it connects").unwrap().0
}

#[tokio::test]
async fn the_newest_checkpoint_is_found_while_another_is_saved() {
    let (shard, address) = listen().await;
    let (mut office, reader_slot) = Office::new([address.clone(), address]);
    tokio::spawn(reader_slot.serve());
    office.save(1).await;
    let _says_nothing = accept(&shard).await;
    office.find(7).await;
    assert_eq!(office.found().await, (7, Some("ckpt-1-9".to_owned())));
}

#[tokio::test]
async fn when_one_shard_fails_the_others_are_left_at_once() {
    let ((silent, first), (failing, second)) = (listen().await, listen().await);
    let (mut office, reader_slot) = Office::new([first, second]);
    tokio::spawn(reader_slot.serve());
    office.save(1).await;
    let held = accept(&silent).await;
    drop(accept(&failing).await);
    let (_, error) = office.saved().await;
    assert!(error.contains("/task:1"), "{error}");
    let closed = async {
        let mut hello = [0; 4096];
        loop {
            held.readable().await.unwrap();
            match held.try_read(&mut hello) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
    };
    tokio::time::timeout(LONG, closed).await.expect("the shard that would go on is left");
}

#[tokio::test]
async fn those_who_ask_while_a_checkpoint_is_looked_for_share_what_is_found() {
    let (mut office, reader_slot) = Office::new([]);
    tokio::spawn(reader_slot.serve());
    office.find(0).await;
    office.found().await;
    let reads = office.gate.passed();
    office.gate.let_through(0);
    office.find(1).await;
    let gate = office.gate.clone();
    tokio::task::spawn_blocking(move || gate.wait_for_reader()).await.unwrap();
    for connection in 2..FINDERS_MAX as u64 + 2 {
        office.find(connection).await;
    }
    let SaverEvent::Found { connection, result: Err(error), .. } = office.news().await else {
        panic!()
    };
    assert_eq!(connection, FINDERS_MAX as u64 + 1);
    assert!(error.contains("1024 ask already"), "{error}");
    office.gate.open_all();
    for connection in 1..=FINDERS_MAX as u64 {
        assert_eq!(office.found().await, (connection, Some("ckpt-1-9".to_owned())));
    }
    assert_eq!(office.gate.passed(), 2 * reads, "it was read once for all of them");
}

#[tokio::test]
async fn a_stop_ends_a_search_after_the_piece_in_hand() {
    let (mut office, mut reader_slot) = Office::new([]);
    let (stop, abandon_flag) =
        (reader_slot.saver.stop.clone(), reader_slot.saver.abandon_flag.clone());
    let publisher = Arc::get_mut(&mut reader_slot.saver.publisher).unwrap();
    publisher.storage = abandon_flag.watch(Arc::new(office.gate.clone()));
    let Desk { saver, .. } = reader_slot;
    office.gate.let_through(0);
    let thread = std::thread::spawn(move || run(saver));
    office.find(1).await;
    let gate = office.gate.clone();
    tokio::task::spawn_blocking(move || gate.wait_for_reader()).await.unwrap();
    stop.cancel();
    let gone = tokio::time::timeout(LONG, office.news.recv()).await.expect("it stops");
    assert!(gone.is_none(), "{gone:?}");
    office.gate.let_through(1);
    thread.join().unwrap().unwrap();
    assert_eq!(office.gate.passed(), 1);
}

fn published(epoch: u32, step: u64, retained: Result<(), String>) -> Published {
    let name = Text::clipped(format!("ckpt-{epoch}-{step}"));
    let (epoch, step) = (RestoreEpoch(epoch), GlobalStep(step));
    Published { checkpoint: CheckpointId { name, epoch, step }, retained }
}

#[test]
fn what_is_due_is_saved_once_and_what_is_asked_for_always() {
    let (office, mut reader_slot) = Office::new([]);
    // Older ones could not be deleted; this one is there all the same.
    let requester = SaveRequester::Ticket(5);
    let news = reader_slot.saved(requester, Ok(published(1, 3, Err("read-only".to_owned()))));
    assert!(matches!(news, SaverEvent::Saved { result: Ok(_), .. }), "{news:?}");
    let counters = reader_slot.saver.counters.clone();
    let counted = (counters.checkpoints_saved.read(), counters.retentions_failed.read());
    assert_eq!((counted, counters.saves_failed.read()), ((1, 1), 0));
    // (ticket, epoch, step) and whether it is saved, after that save.
    let cases = [
        ((PERIODIC_SAVE, 1, 3), false),
        ((PERIODIC_SAVE, 1, 4), true),
        ((PERIODIC_SAVE, 2, 3), true),
        ((6, 1, 3), true),
    ];
    for ((ticket, epoch, step), begins) in cases {
        // The shard hears in any case that its order is carried out.
        assert_eq!(reader_slot.order(office.order(ticket, epoch, step)).is_none(), begins);
        assert_eq!(reader_slot.saving.take().is_some(), begins, "{ticket} {epoch} {step}");
    }
    // A save that has failed has saved nothing.
    reader_slot
        .saved(SaveRequester::Ticket(PERIODIC_SAVE), Err("a disk is full".to_owned().into()));
    assert_eq!(counters.saves_failed.read(), 1);
    assert_eq!(reader_slot.saved, Some((RestoreEpoch(1), GlobalStep(3))));
}

#[test]
fn nothing_is_due_before_there_is_something_new_nor_while_a_save_is_under_way() {
    let (office, mut reader_slot) = Office::new([]);
    assert!(reader_slot.due().is_none(), "nothing is trained");
    reader_slot.saver.counters.global_step.set(3);
    assert!(matches!(
        reader_slot.due(),
        Some(SaverEvent::SaveRequested { ticket: PERIODIC_SAVE, .. })
    ));
    reader_slot.order(office.order(6, 1, 3));
    assert!(reader_slot.due().is_none(), "one is under way");
}

#[test]
fn who_asks_after_a_checkpoint_is_published_is_not_answered_from_before() {
    let (_office, mut reader_slot) = Office::new([]);
    assert!(reader_slot.find((1, Envelope::default())).is_none());
    reader_slot.saved(SaveRequester::Ticket(PERIODIC_SAVE), Ok(published(1, 10, Ok(()))));
    assert!(reader_slot.find((2, Envelope::default())).is_none());
    let asked = |finders: &[Finder]| finders.iter().map(|finder| finder.0).collect::<Vec<_>>();
    assert_eq!(asked(&reader_slot.finding.as_ref().unwrap().finders), [1]);
    assert_eq!(asked(&reader_slot.finders), [2], "a search of its own");
}

/// What a desk tells whoever runs the server, from now on.
fn heard(reader_slot: &mut Desk) -> Arc<std::sync::Mutex<Vec<Event>>> {
    let events = Arc::new(std::sync::Mutex::new(Vec::new()));
    let told = events.clone();
    reader_slot.saver.events =
        EventSink::new(move |event| told.lock().unwrap().push(event.clone()));
    events
}

#[test]
fn saves_that_fail_are_told_counted_and_noted_until_one_succeeds() {
    let directory = tempfile::tempdir().unwrap();
    let (_office, mut reader_slot) = Office::new([]);
    let note = SaveNote::of(directory.path());
    reader_slot.saver.note = Some(note.clone());
    let events = heard(&mut reader_slot);
    let status = reader_slot.saver.record.subscribe();
    let counters = reader_slot.saver.counters.clone();
    reader_slot
        .saved(SaveRequester::Ticket(PERIODIC_SAVE), Err("the disk is full".to_owned().into()));
    // One that the shard has given up before the saver heard of it.
    let result = Err("it has waited 60s".to_owned());
    assert!(reader_slot.order(SaverOrder::ReportSave { ticket: PERIODIC_SAVE, result }).is_none());
    assert_eq!((counters.saves_failed.read(), counters.saves_failed_in_a_row.read()), (2, 2));
    assert_eq!(note.read(), Some((2, "it has waited 60s".to_owned())));
    let now = std::time::Instant::now();
    assert_eq!(status.borrow().status(now).last_error.as_deref(), Some("it has waited 60s"));
    reader_slot.saved(
        SaveRequester::Ticket(PERIODIC_SAVE),
        Ok(published(1, 3, Err("read-only".to_owned()))),
    );
    assert_eq!((counters.saves_failed.read(), counters.saves_failed_in_a_row.read()), (2, 0));
    assert_eq!((note.read(), status.borrow().status(now).failed_in_a_row), (None, 0));
    let failed = |cause: &str, in_a_row| Event::SaveFailed {
        cause: cause.to_owned(),
        in_a_row,
        since_success: None,
    };
    let checkpoint = "ckpt-1-3".to_owned();
    let expected = [
        failed("the disk is full", 1),
        failed("it has waited 60s", 2),
        Event::SavesResumed { checkpoint: checkpoint.clone(), failed: 2 },
        Event::RetentionFailed { checkpoint, cause: "read-only".to_owned() },
    ];
    assert_eq!(*events.lock().unwrap(), expected);
}

#[tokio::test]
async fn a_save_that_fails_leaves_no_files() {
    let (shard, address) = listen().await;
    let (mut office, reader_slot) = Office::new([address.clone(), address]);
    let storage = reader_slot.saver.publisher.storage.clone();
    tokio::spawn(reader_slot.serve());
    office.save(1).await;
    let parts = (accept(&shard).await, accept(&shard).await);
    let temporary = "ckpt-1-10.tmp";
    // What the shards have written so far.
    storage.create(temporary, "shard-0-0.safetensors").unwrap().write(b"half").unwrap();
    storage.create(temporary, "shard-1-0.safetensors").unwrap();
    drop(parts);
    let (_, error) = office.saved().await;
    assert!(error.contains("has not saved its part") && !error.contains("left"), "{error}");
    assert_eq!(storage.list(None).unwrap(), ["ckpt-1-9"]);
    // A shard that is late finds no folder, as the next save has another name.
    office.save(2).await;
    let _parts = (accept(&shard).await, accept(&shard).await);
    let mut folders = storage.list(None).unwrap();
    folders.sort();
    assert_eq!(folders, ["ckpt-1-10.1.tmp", "ckpt-1-9"]);
}

#[tokio::test]
async fn a_checkpoint_that_is_passed_over_is_told_and_counted() {
    let (mut office, mut reader_slot) = Office::new([]);
    let (events, counters) = (heard(&mut reader_slot), reader_slot.saver.counters.clone());
    let storage = reader_slot.saver.publisher.storage.clone();
    tokio::spawn(reader_slot.serve());
    storage.create_folder("ckpt-1-12").unwrap();
    office.find(1).await;
    assert_eq!(office.found().await, (1, Some("ckpt-1-9".to_owned())));
    assert_eq!(counters.checkpoints_passed_over.read(), 1);
    let told = std::mem::take(&mut *events.lock().unwrap());
    let [Event::CheckpointPassedOver { checkpoint, cause, taken }] = &told[..] else {
        panic!("{told:?}")
    };
    assert_eq!((&**checkpoint, taken.as_deref()), ("ckpt-1-12", Some("ckpt-1-9")));
    assert!(cause.contains("MANIFEST"), "{cause}");
    // No sound one is left.
    storage.remove_folder("ckpt-1-9").unwrap();
    office.find(2).await;
    let SaverEvent::Found { result: Err(error), .. } = office.news().await else { panic!() };
    assert!(error.contains("ckpt-1-12"), "{error}");
    let told = events.lock().unwrap();
    assert!(matches!(&told[..], [Event::CheckpointPassedOver { taken: None, .. }]), "{told:?}");
}
