use super::*;

const LEASE: Duration = Duration::from_secs(5);

fn admit(
    registry: &mut ClientRegistry,
    incarnation: u64,
    epoch: u64,
    now: Instant,
) -> Result<AdmittedClient, Refusal> {
    let task = TaskId::worker(0);
    registry.admit(&task, Incarnation(incarnation), ClientEpoch(epoch), true, 1, now)
}

#[test]
fn a_restart_fences_its_client_and_a_reconnect_does_not() {
    let now = Instant::now();
    let mut registry = ClientRegistry::new(LEASE, 0, PlantedBugs::default());
    let first = admit(&mut registry, 10, 0, now).unwrap();
    assert_eq!((first.epoch, first.fenced), (ClientEpoch(1), false));
    let again = admit(&mut registry, 10, 1, now).unwrap();
    assert_eq!((again.epoch, again.fenced, again.replaced), (ClientEpoch(1), false, Some(1)));
    let unanswered = admit(&mut registry, 10, 0, now).unwrap();
    assert_eq!(unanswered.epoch, ClientEpoch(1), "the welcome was lost");
    let restarted = admit(&mut registry, 11, 0, now).unwrap();
    assert_eq!((restarted.epoch, restarted.fenced), (ClientEpoch(2), true));
    let outdated = admit(&mut registry, 10, 1, now).unwrap_err();
    assert!(matches!(outdated, Refusal::Fenced { current: ClientEpoch(2), .. }));
    let forged = admit(&mut registry, 12, u64::MAX, now).unwrap_err();
    let epoch = ClientEpoch(u64::MAX);
    let newest = ClientEpoch(2);
    assert_eq!(forged, Refusal::UnknownEpoch { epoch, newest });
    assert_eq!(admit(&mut registry, 12, 0, now).unwrap().epoch, ClientEpoch(3));
}

/// A shard that assigns no epochs restarts, and its clock is wrong.
#[test]
fn what_a_shard_has_recorded_it_knows_whatever_its_clock_says() {
    const DAY: u64 = 24 * 60 * 60 * 1000;
    let now = Instant::now();
    let task = TaskId::worker(0);
    let incarnation = Incarnation(7);
    for clock in [0, 98, 100, 102, 9_000].map(|days| days * DAY) {
        let mut registry = ClientRegistry::new(LEASE, clock, PlantedBugs::default());
        registry.mint_above(100 * DAY + 5);
        let recorded = DurableClient {
            task: task.clone(),
            epoch: ClientEpoch(100 * DAY),
            incarnation,
            presence: ClientPresence::Present,
            window: PushWindow::new(PlantedBugs::default()),
            reads_data: false,
        };
        assert!(registry.restore(recorded, now));
        registry.begin(now);
        let admit = |registry: &mut ClientRegistry, task: &TaskId, incarnation, epoch, now| {
            let epoch = ClientEpoch(epoch);
            let mint = false;
            registry.admit(task, Incarnation(incarnation), epoch, mint, 1, now)
        };
        // The client reconnects, and one that the shard had not met yet joins.
        assert!(!admit(&mut registry, &task, 7, 100 * DAY, now).unwrap().fenced, "{clock}");
        admit(&mut registry, &TaskId::worker(1), 8, 100 * DAY + 5, now).unwrap();
        // A false epoch is refused as ever.
        let newest = 100 * DAY + clock.max(100 * DAY);
        let refused = admit(&mut registry, &TaskId::worker(2), 9, newest + 2 * DAY, now);
        assert!(matches!(refused, Err(Refusal::UnknownEpoch { .. })), "{clock}: {refused:?}");
        // The step owner has assigned epochs for five days since.
        registry.learn_owner_time(ClientEpoch(105 * DAY), now);
        let later = now + Duration::from_secs(2 * 24 * 60 * 60);
        admit(&mut registry, &TaskId::worker(3), 10, 107 * DAY, later).unwrap();
    }
}

/// A step owner that has lost its state, and has a slow clock, learns what others have recorded.
#[test]
fn an_owner_assigns_epochs_above_those_that_other_shards_have_recorded() {
    let now = Instant::now();
    let mut registry = ClientRegistry::new(LEASE, 5, PlantedBugs::default());
    registry.begin(now);
    assert!(!registry.mint_above_recorded(ClientEpoch(5), now), "the others know this time");
    assert!(registry.mint_above_recorded(ClientEpoch(1_000_000), now));
    assert_eq!(registry.owner_time(now), ClientEpoch(1_000_000));
    assert_eq!(admit(&mut registry, 1, 0, now).unwrap().epoch, ClientEpoch(1_000_001));
    // No claim leaves it without epochs.
    assert!(registry.mint_above_recorded(ClientEpoch(u64::MAX), now));
    assert_eq!(admit(&mut registry, 2, 0, now).unwrap().epoch.0, EPOCH_LIMIT / 2 + 1);
}

#[test]
fn restarts_of_a_task_share_one_entry() {
    let now = Instant::now();
    let mut registry = ClientRegistry::new(LEASE, 0, PlantedBugs::default());
    for incarnation in 1..=100 {
        let admitted = admit(&mut registry, incarnation, 0, now).unwrap();
        assert_eq!(admitted.epoch, ClientEpoch(incarnation));
    }
    assert_eq!(registry.counts(), (1, 1));
}

#[test]
fn silence_of_a_lease_loses_a_client_and_a_pause_of_the_server_does_not() {
    let start = Instant::now();
    let mut registry = ClientRegistry::new(LEASE, 0, PlantedBugs::default());
    let key = admit(&mut registry, 1, 0, start).unwrap().key;
    let mut now = start;
    let mut step = |registry: &mut ClientRegistry, millis| {
        now += Duration::from_millis(millis);
        registry.expire(now)
    };
    assert!(step(&mut registry, 100).is_empty());
    assert!(step(&mut registry, 60_000).is_empty(), "the server was paused, not the client");
    for _ in 0..48 {
        assert!(step(&mut registry, 100).is_empty());
    }
    assert_eq!(step(&mut registry, 100), [key]);
    assert_eq!(registry.counts(), (1, 0));
    assert!(step(&mut registry, 100).is_empty(), "a client is lost once");
}

/// A registry in which all entries are taken, by tasks whose clients have no connection.
fn full(listed: &str, now: Instant) -> ClientRegistry {
    let registry = ClientRegistry::new(LEASE, 0, PlantedBugs::default());
    let mut registry = registry.keeping(listed.parse().unwrap());
    for task in 0..CLIENTS_MAX as u32 {
        let key = join(&mut registry, task, 0, now).unwrap().key;
        registry.client_mut(key).connection = None;
    }
    registry
}

fn join(
    registry: &mut ClientRegistry,
    task: u32,
    epoch: u64,
    now: Instant,
) -> Result<AdmittedClient, Refusal> {
    let incarnation = Incarnation(task.into());
    registry.admit(&TaskId::worker(task), incarnation, ClientEpoch(epoch), true, 1, now)
}

const NEW: u32 = CLIENTS_MAX as u32;

#[test]
fn a_new_task_takes_the_entry_of_one_that_has_left_or_was_lost_for_long() {
    let start = Instant::now();
    let mut registry = full("ps=a:1;worker=7@b:1", start);
    let busy = |refused| matches!(refused, Err(Refusal::Busy { limit: 16_384, .. }));
    assert!(busy(join(&mut registry, NEW, 0, start)), "all are present");
    let set = |registry: &mut ClientRegistry, task: u32, presence| {
        registry.client_mut(ClientKey(task)).presence = presence;
    };
    // A listed task keeps its entry, and so do clients that are named.
    set(&mut registry, 7, ClientPresence::Left);
    set(&mut registry, 8, ClientPresence::Left);
    registry.keep(vec![ClientKey(8)]);
    assert!(busy(join(&mut registry, NEW, 0, start)));
    // A lost client may come back, until it has been silent for long.
    set(&mut registry, 9, ClientPresence::Lost);
    assert!(busy(join(&mut registry, NEW, 0, start + 11 * LEASE)));
    set(&mut registry, 10, ClientPresence::Left);
    let later = start + 12 * LEASE;
    for gone in [10, 9] {
        let joined = join(&mut registry, NEW + gone, 0, later).unwrap();
        assert_eq!((joined.key, joined.fenced, joined.joins), (ClientKey(gone), true, true));
        assert!(!joined.is_known);
        assert_eq!(registry.find(&TaskId::worker(NEW + gone)), Some(ClientKey(gone)));
        assert_eq!(registry.find(&TaskId::worker(gone)), None);
    }
    assert!(busy(join(&mut registry, NEW, 0, later)));
    assert_eq!(registry.counts().0, CLIENTS_MAX);
}

#[test]
fn a_forgotten_client_is_told_to_join_again_as_a_new_one() {
    let now = Instant::now();
    let mut registry = full("ps=a:1", now);
    let epoch = registry.client(ClientKey(3)).epoch.0;
    registry.client_mut(ClientKey(3)).presence = ClientPresence::Left;
    join(&mut registry, NEW, 0, now).unwrap();
    assert_eq!(registry.forgotten(), epoch);
    registry.client_mut(ClientKey(4)).presence = ClientPresence::Left;
    // A push that it sends again could count twice.
    let refused = join(&mut registry, 3, epoch, now).unwrap_err();
    let over = Refusal::UnknownEpoch { epoch: ClientEpoch(epoch), newest: ClientEpoch(0) };
    assert_eq!(refused, over);
    let again = join(&mut registry, 3, 0, now).unwrap();
    assert!(again.epoch.0 > epoch && again.key == ClientKey(4));
    // A shard that has restarted knows it, too.
    let mut restarted = ClientRegistry::new(LEASE, 1 << 20, PlantedBugs::default());
    restarted.restore_forgotten(registry.forgotten());
    assert_eq!(join(&mut restarted, 3, epoch, now).unwrap_err(), over);
}
