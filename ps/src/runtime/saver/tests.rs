//! Tests of saves, shared searches, and saves that are skipped.

use pushpull_checkpoint::Retention;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{ShardId, TaskId};
use pushpull_common::protocol::Features;
use pushpull_common::protocol::wire::Text;
use pushpull_optim::optimizer::{OptimizerRules, Sgd};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use crate::checkpoint::tests::gate::Gate;
use crate::checkpoint::tests::save_of_two_tasks;
use crate::peer_hello::PeerHello;

/// Limit on every wait, so that a hang fails the test.
const LONG: Duration = Duration::from_secs(60);

/// The other ends of a saver's channels, and its storage.
struct SaverHarness {
    orders: mpsc::Sender<SaverOrder>,
    news: mpsc::Receiver<SaverEvent>,
    _save_waiters: mpsc::Sender<SaveWaiter>,
    gate: Gate,
    catalogue: Arc<Catalogue>,
    /// The folder behind the gate.
    _folder: tempfile::TempDir,
}

impl SaverHarness {
    /// Returns a harness and a saver for shards at these addresses, reachable or not.
    fn new(addresses: impl IntoIterator<Item = String>) -> (SaverHarness, SaverService) {
        let folder = tempfile::tempdir().unwrap();
        let (storage, catalogue) = save_of_two_tasks(folder.path());
        let gate = Gate::new(storage);
        let (orders, ordered) = mpsc::channel(64);
        let (event_sender, news) = mpsc::channel(64);
        let (save_waiters, waiter_receiver) = mpsc::channel(1);
        let publisher = Publisher {
            storage: Arc::new(gate.clone()),
            retention: Retention::default(),
            peer_hello: PeerHello {
                task: TaskId::ps(0),
                identity: Identity::new(),
                features: Features::ALL,
                credentials: None,
            },
            addresses: (0..).zip(addresses).collect(),
            rules: OptimizerRules::new(Arc::new(Sgd::new(1.0))),
            owner: ShardId { task: 0, shard: 0 },
        };
        let service = SaverService::new(Saver {
            publisher: Arc::new(publisher),
            every: None,
            on_failure: OnSaveFailure::Continue,
            counters: Arc::default(),
            record: watch::channel(SaveRecord::default()).0,
            note: None,
            events: EventSink::default(),
            orders: ordered,
            save_waiters: waiter_receiver,
            news: event_sender,
            abandon_flag: AbandonFlag::default(),
            stop: CancellationToken::new(),
        });
        let harness = SaverHarness {
            orders,
            news,
            _save_waiters: save_waiters,
            gate,
            catalogue,
            _folder: folder,
        };
        (harness, service)
    }

    fn order(&self, ticket: u64, epoch: u32, step: u64) -> SaverOrder {
        let epoch = RestoreEpoch(epoch);
        let step = GlobalStep(step);
        let requester = SaveRequester::Ticket(ticket);
        let catalogue = self.catalogue.clone();
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
        tokio::time::timeout(LONG, self.news.recv()).await.expect("no event").unwrap()
    }

    async fn saved(&mut self) -> (SaveRequester, String) {
        match self.news().await {
            SaverEvent::Saved { requester, result: Err(error) } => (requester, error.to_string()),
            other => panic!("{other:?}"),
        }
    }

    /// The connection that is answered, and the name of the checkpoint that was found.
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
    tokio::time::timeout(LONG, listener.accept()).await.expect("no connection").unwrap().0
}

#[tokio::test]
async fn the_newest_checkpoint_is_found_while_another_is_saved() {
    let (shard, address) = listen().await;
    let (mut harness, service) = SaverHarness::new([address.clone(), address]);
    tokio::spawn(service.serve());
    harness.save(1).await;
    let _silent = accept(&shard).await;
    harness.find(7).await;
    assert_eq!(harness.found().await, (7, Some("ckpt-1-9".to_owned())));
}

#[tokio::test]
async fn a_failing_shard_closes_the_connections_to_the_others() {
    let (silent, first) = listen().await;
    let (failing, second) = listen().await;
    let (mut harness, service) = SaverHarness::new([first, second]);
    tokio::spawn(service.serve());
    harness.save(1).await;
    let held = accept(&silent).await;
    drop(accept(&failing).await);
    let (_, error) = harness.saved().await;
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
    tokio::time::timeout(LONG, closed)
        .await
        .expect("the connection to the silent shard is not closed");
}

/// A failed save stops the server only by its setting, and its requester is answered before.
#[tokio::test]
async fn a_failed_save_stops_the_server_by_its_setting() {
    for (on_failure, stops) in [(OnSaveFailure::Continue, false), (OnSaveFailure::Stop, true)] {
        let (failing, address) = listen().await;
        let (mut harness, mut service) = SaverHarness::new([address]);
        service.saver.on_failure = on_failure;
        let stop = service.saver.stop.clone();
        tokio::spawn(service.serve());
        harness.save(1).await;
        drop(accept(&failing).await);
        harness.saved().await;
        if stops {
            tokio::time::timeout(LONG, stop.cancelled()).await.expect("the server goes on");
        } else {
            // The saver has gone on to its next order.
            harness.find(7).await;
            assert_eq!(harness.found().await.0, 7);
            assert!(!stop.is_cancelled());
        }
    }
}

#[tokio::test]
async fn requests_during_a_search_share_its_result() {
    let (mut harness, service) = SaverHarness::new([]);
    tokio::spawn(service.serve());
    harness.find(0).await;
    harness.found().await;
    let reads = harness.gate.passed();
    harness.gate.let_through(0);
    harness.find(1).await;
    let gate = harness.gate.clone();
    tokio::task::spawn_blocking(move || gate.wait_for_reader()).await.unwrap();
    for connection in 2..FINDERS_MAX as u64 + 2 {
        harness.find(connection).await;
    }
    let SaverEvent::Found { connection, result: Err(error), .. } = harness.news().await else {
        panic!()
    };
    assert_eq!(connection, FINDERS_MAX as u64 + 1);
    assert!(error.to_string().contains("1024 requests already wait"), "{error}");
    harness.gate.open_all();
    for connection in 1..=FINDERS_MAX as u64 {
        assert_eq!(harness.found().await, (connection, Some("ckpt-1-9".to_owned())));
    }
    assert_eq!(harness.gate.passed(), 2 * reads, "one search must answer all of them");
}

#[tokio::test]
async fn a_stop_ends_a_search_after_the_current_piece() {
    let (mut harness, mut service) = SaverHarness::new([]);
    let stop = service.saver.stop.clone();
    let abandon_flag = service.saver.abandon_flag.clone();
    let publisher = Arc::get_mut(&mut service.saver.publisher).unwrap();
    publisher.storage = abandon_flag.watch(Arc::new(harness.gate.clone()));
    let SaverService { saver, .. } = service;
    harness.gate.let_through(0);
    let thread = std::thread::spawn(move || run(saver));
    harness.find(1).await;
    let gate = harness.gate.clone();
    tokio::task::spawn_blocking(move || gate.wait_for_reader()).await.unwrap();
    stop.cancel();
    let ended =
        tokio::time::timeout(LONG, harness.news.recv()).await.expect("the saver does not stop");
    assert!(ended.is_none(), "{ended:?}");
    harness.gate.let_through(1);
    thread.join().unwrap().unwrap();
    assert_eq!(harness.gate.passed(), 1);
}

fn published(epoch: u32, step: u64, retained: Result<(), String>) -> PublishedSave {
    let name = Text::clipped(format!("ckpt-{epoch}-{step}"));
    let epoch = RestoreEpoch(epoch);
    let step = GlobalStep(step);
    PublishedSave { checkpoint: CheckpointId { name, epoch, step }, retained }
}

#[test]
fn a_step_is_saved_periodically_once_and_on_request_always() {
    let (harness, mut service) = SaverHarness::new([]);
    // Older checkpoints could not be deleted; the new one counts as saved all the same.
    let requester = SaveRequester::Ticket(5);
    let news = service.saved(requester, Ok(published(1, 3, Err("read-only".to_owned()))));
    assert!(matches!(news, SaverEvent::Saved { result: Ok(_), .. }), "{news:?}");
    let counters = service.saver.counters.clone();
    let counted = (counters.checkpoints_saved.read(), counters.retentions_failed.read());
    assert_eq!((counted, counters.saves_failed.read()), ((1, 1), 0));
    // (ticket, epoch, step), and whether a save begins after the one above.
    let cases = [
        ((PERIODIC_SAVE, 1, 3), false),
        ((PERIODIC_SAVE, 1, 4), true),
        ((PERIODIC_SAVE, 2, 3), true),
        ((6, 1, 3), true),
    ];
    for ((ticket, epoch, step), begins) in cases {
        // The shard gets an answer in any case.
        assert_eq!(service.order(harness.order(ticket, epoch, step)).is_none(), begins);
        assert_eq!(service.saving.take().is_some(), begins, "{ticket} {epoch} {step}");
    }
    // A failed save does not count as the last saved step.
    service.saved(SaveRequester::Ticket(PERIODIC_SAVE), Err(storage("a disk is full").into()));
    assert_eq!(counters.saves_failed.read(), 1);
    assert_eq!(service.saved, Some((RestoreEpoch(1), GlobalStep(3))));
}

#[test]
fn no_save_is_due_before_training_or_during_a_save() {
    let (harness, mut service) = SaverHarness::new([]);
    assert!(service.due().is_none(), "nothing has been trained");
    service.saver.counters.global_step.set(3);
    assert!(matches!(service.due(), Some(SaverEvent::SaveRequested { ticket: PERIODIC_SAVE, .. })));
    service.order(harness.order(6, 1, 3));
    assert!(service.due().is_none(), "a save is under way");
}

#[test]
fn a_request_after_a_publication_gets_its_own_search() {
    let (_harness, mut service) = SaverHarness::new([]);
    assert!(service.find((1, Envelope::default())).is_none());
    service.saved(SaveRequester::Ticket(PERIODIC_SAVE), Ok(published(1, 10, Ok(()))));
    assert!(service.find((2, Envelope::default())).is_none());
    let asked = |finders: &[Finder]| finders.iter().map(|finder| finder.0).collect::<Vec<_>>();
    assert_eq!(asked(&service.search.as_ref().unwrap().finders), [1]);
    assert_eq!(asked(&service.finders), [2], "the second request needs a search of its own");
}

/// Records the events that a saver emits from now on.
fn record_events(service: &mut SaverService) -> Arc<std::sync::Mutex<Vec<Event>>> {
    let events = Arc::new(std::sync::Mutex::new(Vec::new()));
    let recorded = events.clone();
    service.saver.events =
        EventSink::new(move |event| recorded.lock().unwrap().push(event.clone()));
    events
}

#[test]
fn failed_saves_are_reported_counted_and_noted_until_one_succeeds() {
    let directory = tempfile::tempdir().unwrap();
    let (_harness, mut service) = SaverHarness::new([]);
    let note = SaveNote::of(directory.path());
    service.saver.note = Some(note.clone());
    let events = record_events(&mut service);
    let status = service.saver.record.subscribe();
    let counters = service.saver.counters.clone();
    service.saved(SaveRequester::Ticket(PERIODIC_SAVE), Err(storage("the disk is full").into()));
    // A save that the shard gave up before the saver had the order.
    let result = Err(storage("it has waited 60s"));
    assert!(service.order(SaverOrder::ReportSave { ticket: PERIODIC_SAVE, result }).is_none());
    assert_eq!((counters.saves_failed.read(), counters.saves_failed_in_a_row.read()), (2, 2));
    assert_eq!(note.read(), Some((2, "it has waited 60s".to_owned())));
    let now = std::time::Instant::now();
    assert_eq!(status.borrow().status(now).last_error.as_deref(), Some("it has waited 60s"));
    service.saved(
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
        Event::CheckpointSaved { checkpoint: checkpoint.clone(), step: 3 },
        Event::SavesResumed { checkpoint: checkpoint.clone(), failed: 2 },
        Event::RetentionFailed { checkpoint, cause: "read-only".to_owned() },
    ];
    assert_eq!(*events.lock().unwrap(), expected);
}

#[tokio::test]
async fn a_save_that_fails_leaves_no_files() {
    let (shard, address) = listen().await;
    let (mut harness, service) = SaverHarness::new([address.clone(), address]);
    let storage = service.saver.publisher.storage.clone();
    tokio::spawn(service.serve());
    harness.save(1).await;
    let parts = (accept(&shard).await, accept(&shard).await);
    let temporary = "ckpt-1-10.tmp";
    // The files that the shards have written so far.
    storage.create(temporary, "shard-0-0.safetensors").unwrap().write(b"half").unwrap();
    storage.create(temporary, "shard-1-0.safetensors").unwrap();
    drop(parts);
    let (_, error) = harness.saved().await;
    assert!(error.contains("has not saved its part") && !error.contains("left"), "{error}");
    assert_eq!(storage.list(None).unwrap(), ["ckpt-1-9"]);
    // A slow shard of the first save finds no folder, because the next save has another name.
    harness.save(2).await;
    let _parts = (accept(&shard).await, accept(&shard).await);
    let mut folders = storage.list(None).unwrap();
    folders.sort();
    assert_eq!(folders, ["ckpt-1-10.1.tmp", "ckpt-1-9"]);
}

#[tokio::test]
async fn a_passed_over_checkpoint_is_reported_and_counted() {
    let (mut harness, mut service) = SaverHarness::new([]);
    let events = record_events(&mut service);
    let counters = service.saver.counters.clone();
    let storage = service.saver.publisher.storage.clone();
    tokio::spawn(service.serve());
    storage.create_folder("ckpt-1-12").unwrap();
    harness.find(1).await;
    assert_eq!(harness.found().await, (1, Some("ckpt-1-9".to_owned())));
    assert_eq!(counters.checkpoints_passed_over.read(), 1);
    let emitted = std::mem::take(&mut *events.lock().unwrap());
    let [Event::CheckpointPassedOver { checkpoint, cause, taken }] = &emitted[..] else {
        panic!("{emitted:?}")
    };
    assert_eq!((&**checkpoint, taken.as_deref()), ("ckpt-1-12", Some("ckpt-1-9")));
    assert!(cause.contains("MANIFEST"), "{cause}");
    // No sound checkpoint is left.
    storage.remove_folder("ckpt-1-9").unwrap();
    harness.find(2).await;
    let SaverEvent::Found { result: Err(error), .. } = harness.news().await else { panic!() };
    assert!(error.to_string().contains("ckpt-1-12"), "{error}");
    let emitted = events.lock().unwrap();
    assert!(
        matches!(&emitted[..], [Event::CheckpointPassedOver { taken: None, .. }]),
        "{emitted:?}"
    );
}

fn storage(cause: &str) -> CheckpointFault {
    CheckpointFault::Storage(cause.to_owned())
}
