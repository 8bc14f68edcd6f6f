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
    let (epoch, newest) = (ClientEpoch(u64::MAX), ClientEpoch(2));
    assert_eq!(forged, Refusal::UnknownEpoch { epoch, newest });
    assert_eq!(admit(&mut registry, 12, 0, now).unwrap().epoch, ClientEpoch(3));
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
