//! Checkpoint cuts. In synchronous mode all parts of a checkpoint are of one step, while training
//! continues. In asynchronous mode only the step owner's part is of the checkpoint's step.

use std::sync::Arc;
use std::time::Duration;

use pushpull_checkpoint::{
    CheckpointFault, CheckpointStorage, Contents, LocalDirectory, Save, ShardEntry,
};
use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::protocol::message::{self, CheckpointId, Role};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Message, Outcome, Refusal};

use super::peers::{Peer, worker};
use super::synchronous::{ACCEPTED, ShardCluster, synchronous};
use super::world::ConnectionId;
use crate::checkpoint::tests::by_sgd;
use crate::config::{Checkpoints, Mode};
use crate::shard::ShardInput;
use crate::shard::file_work::saver_order::{PERIODIC_SAVE, SaveRequester, SaverEvent, SaverOrder};

/// Two shards and two replicas, with checkpoint storage.
fn cluster(folder: &std::path::Path) -> (ShardCluster, Arc<dyn CheckpointStorage>) {
    cluster_of(folder, synchronous(2, 2))
}

fn cluster_of(
    folder: &std::path::Path,
    mode: impl Into<Mode>,
) -> (ShardCluster, Arc<dyn CheckpointStorage>) {
    let storage = || LocalDirectory::create(folder).unwrap();
    let checkpoints = Checkpoints::new(storage());
    let configure = |config: crate::config::PsConfig| config.checkpoints(checkpoints.clone());
    let mut cluster = ShardCluster::new(2, mode, configure);
    let storage: Arc<dyn CheckpointStorage> = Arc::new(storage());
    cluster.world.storage = Some(storage.clone());
    (cluster, storage)
}

/// Makes a step of the gradients 1 and 3.
fn step(cluster: &mut ShardCluster, step: u64) {
    let a = cluster.token(0);
    let b = cluster.token(1);
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(step));
    assert_eq!(cluster.push(1, b, 3.0), ACCEPTED(step));
}

/// Requests a checkpoint as the chief, and returns the steps of the saves that are ordered by now.
fn request_save(cluster: &mut ShardCluster) -> Vec<u64> {
    let line = cluster.replicas[0].lines[0];
    cluster.world.say(line, message::Save {}.into());
    cluster.settle();
    ordered_steps(cluster)
}

fn ordered_steps(cluster: &mut ShardCluster) -> Vec<u64> {
    let orders = std::mem::take(&mut cluster.world.orders);
    let step = |(_, order)| match order {
        SaverOrder::Save { step, .. } => Some(step.0),
        _ => None,
    };
    orders.into_iter().filter_map(step).collect()
}

/// Connects a task that asks a shard for its part of a checkpoint.
fn connect_peer(cluster: &mut ShardCluster, shard: usize) -> ConnectionId {
    let peer = Peer { role: Role::Peer {}, ..worker(80) };
    cluster.world.handshake(shard, peer.hello(shard), false).unwrap().0
}

fn part(cluster: &mut ShardCluster, shard: usize, save: &Save) -> ShardEntry {
    let name = Text::clipped(save.name().to_string());
    let line = connect_peer(cluster, shard);
    let request = cluster.world.say(line, message::SaveShard { name }.into());
    let entry = cluster.world.answer_body(line, request);
    serde_json::from_slice(&entry).unwrap()
}

#[test]
fn a_checkpoint_is_of_the_step_that_all_shards_had_applied() {
    let folder = tempfile::tempdir().unwrap();
    let (mut cluster, storage) = cluster(folder.path());
    step(&mut cluster, 0);
    // In the middle of the second step: one of its gradients is admitted.
    let a = cluster.token(0);
    let b = cluster.token(1);
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(1));
    assert_eq!(request_save(&mut cluster), [1]);
    let save = Save::begin(storage, RestoreEpoch(1), GlobalStep(1), None).unwrap();
    let early = part(&mut cluster, 1, &save);
    assert_eq!(cluster.push(1, b, 3.0), ACCEPTED(1));
    step(&mut cluster, 2);
    assert_eq!(cluster.values(3), (-6.0, -6.0));
    let late = part(&mut cluster, 0, &save);
    assert_eq!((early.gradients, late.gradients), (1, 1));
    publish_and_restore(&mut cluster, save, vec![late, early]);
    assert_eq!(cluster.values(1), (-2.0, -2.0), "both parts are of the first step");
}

/// Publishes a checkpoint of these parts, and restores it on every shard.
fn publish_and_restore(cluster: &mut ShardCluster, save: Save, shards: Vec<ShardEntry>) {
    let catalogue = cluster.world.catalogue.clone();
    let training = by_sgd(&catalogue);
    let name = save.name();
    let epoch = RestoreEpoch(name.restore_epoch);
    let step = GlobalStep(name.global_step);
    let name = Text::clipped(name.to_string());
    let contents = Contents { saved_unix_ms: 1, training, shards, user: Vec::new() };
    save.publish(&catalogue, contents).unwrap();
    let checkpoint = CheckpointId { name, epoch, step };
    for line in cluster.replicas[0].lines.clone() {
        cluster.world.declare(line, &catalogue);
        let epoch = RestoreEpoch(2);
        let restore = message::Restore { checkpoint: checkpoint.clone(), epoch };
        let request = cluster.world.say(line, restore.into());
        cluster.world.finish_restores();
        assert!(matches!(cluster.world.answer(line, request), Some(Message::Ready(_))));
    }
}

/// Pushes one gradient to all shards in asynchronous mode.
fn update(cluster: &mut ShardCluster) {
    let grant = cluster.token(0);
    assert!(matches!(cluster.push(0, grant, 1.0), Some(Outcome::Applied { .. })));
}

#[test]
fn an_asynchronous_cut_of_the_step_owner_has_the_updates_that_its_step_counts() {
    let folder = tempfile::tempdir().unwrap();
    let (mut cluster, storage) = cluster_of(folder.path(), Mode::default());
    update(&mut cluster);
    assert_eq!(request_save(&mut cluster), [1]);
    update(&mut cluster);
    let save = Save::begin(storage, RestoreEpoch(1), GlobalStep(1), None).unwrap();
    let parts = vec![part(&mut cluster, 0, &save), part(&mut cluster, 1, &save)];
    let gradients: Vec<u64> = parts.iter().map(|part| part.gradients).collect();
    assert_eq!(gradients, [1, 2], "another shard saves its present values");
    publish_and_restore(&mut cluster, save, parts);
    cluster.replicas[0].sequence += 1;
    let line = cluster.replicas[0].lines[0];
    let request = cluster.world.say(line, message::TokenRequest { newest: 0.into() }.into());
    let Some(Message::Granted(granted)) = cluster.world.answer(line, request) else {
        panic!("no token is granted")
    };
    assert_eq!(granted.grant.step, GlobalStep(1));
}

#[test]
fn asynchronous_saves_run_one_at_a_time_and_at_most_16_wait() {
    let folder = tempfile::tempdir().unwrap();
    let (mut cluster, storage) = cluster_of(folder.path(), Mode::default());
    update(&mut cluster);
    assert_eq!(request_save(&mut cluster), [1]);
    for ticket in 1..=17 {
        let save_request = SaverEvent::SaveRequested { ticket, user: Vec::new() };
        cluster.world.input(0, ShardInput::SaverEvent(save_request));
    }
    let mut reports = Vec::new();
    for (_, order) in std::mem::take(&mut cluster.world.orders) {
        let SaverOrder::ReportSave { ticket, result: Err(error) } = order else {
            panic!("{order:?}")
        };
        reports.push((ticket, error));
    }
    let cause = "cannot save now: 16 saves wait already".to_owned();
    assert_eq!(reports, [(17, CheckpointFault::Unavailable(cause))]);
    // The cut of a running save is kept without a time limit: only the saver ends a save.
    cluster.pass(Duration::from_secs(100), &[0, 1]);
    update(&mut cluster);
    let save = Save::begin(storage, RestoreEpoch(1), GlobalStep(1), None).unwrap();
    assert_eq!(part(&mut cluster, 0, &save).gradients, 1);
    for _ in 1..=16 {
        assert_eq!(ordered_steps(&mut cluster), [] as [u64; 0]);
        let news = SaverEvent::Saved {
            requester: SaveRequester::Ticket(100),
            result: Err(CheckpointFault::Storage("no disk".to_owned())),
        };
        cluster.world.input(0, ShardInput::SaverEvent(news));
        let orders = std::mem::take(&mut cluster.world.orders);
        let saves = orders.iter().filter(|(_, order)| matches!(order, SaverOrder::Save { .. }));
        assert_eq!(saves.count(), 1, "{orders:?}");
    }
}

#[test]
fn a_save_waits_for_every_shard_to_apply_the_step_and_for_the_save_before() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = one_behind(folder.path());
    assert_eq!(
        request_save(&mut cluster),
        [] as [u64; 0],
        "one shard is at step 0, and one at step 1"
    );
    cluster.link(1);
    assert_eq!(ordered_steps(&mut cluster), [1]);
    assert_eq!(request_save(&mut cluster), [] as [u64; 0], "another save is running");
    step(&mut cluster, 1);
    let error = Err(CheckpointFault::Storage("the disk is full".to_owned()));
    let news = SaverEvent::Saved { requester: SaveRequester::Ticket(1), result: error };
    cluster.world.input(0, ShardInput::SaverEvent(news));
    assert_eq!(ordered_steps(&mut cluster), [2]);
}

#[test]
fn a_shard_that_connects_during_a_save_keeps_a_cut_before_it_applies_the_next_step() {
    let folder = tempfile::tempdir().unwrap();
    let (mut cluster, storage) = cluster(folder.path());
    let line = cluster.links[1].take().unwrap();
    cluster.world.disconnect(line);
    assert_eq!(request_save(&mut cluster), [0]);
    cluster.link(1);
    step(&mut cluster, 0);
    let save = Save::begin(storage.clone(), RestoreEpoch(1), GlobalStep(0), None).unwrap();
    let parts = vec![part(&mut cluster, 0, &save), part(&mut cluster, 1, &save)];
    assert_eq!(parts.iter().map(|part| part.gradients).collect::<Vec<_>>(), [0, 0]);
    publish_and_restore(&mut cluster, save, parts);
    assert_eq!(cluster.values(0), (0.0, 0.0), "both parts are of step 0");
}

#[test]
fn a_shard_that_connects_after_a_save_keeps_no_cut() {
    let folder = tempfile::tempdir().unwrap();
    let (mut cluster, storage) = cluster(folder.path());
    assert_eq!(request_save(&mut cluster), [0]);
    let news = SaverEvent::Saved {
        requester: SaveRequester::Ticket(1),
        result: Err(CheckpointFault::Storage("the disk is full".to_owned())),
    };
    cluster.world.input(0, ShardInput::SaverEvent(news));
    let save = Save::begin(storage, RestoreEpoch(1), GlobalStep(0), None).unwrap();
    assert_eq!(part(&mut cluster, 1, &save).gradients, 0, "it uses up the cut that was kept");
    let line = cluster.links[1].take().unwrap();
    cluster.world.disconnect(line);
    cluster.link(1);
    step(&mut cluster, 0);
    assert_refused(&mut cluster, &save);
}

#[test]
fn a_shard_without_a_cut_of_the_step_refuses_to_save_it() {
    let folder = tempfile::tempdir().unwrap();
    let (mut cluster, storage) = cluster(folder.path());
    step(&mut cluster, 0);
    let save = Save::begin(storage, RestoreEpoch(1), GlobalStep(0), None).unwrap();
    assert_refused(&mut cluster, &save);
}

/// A cluster whose second shard has yet to apply a step: it holds the last gradient, but does not
/// receive the commit of the step.
fn one_behind(folder: &std::path::Path) -> ShardCluster {
    let (mut cluster, _) = cluster(folder);
    let a = cluster.token(0);
    let b = cluster.token(1);
    cluster.push(0, a, 1.0);
    cluster.replicas[1].sequence += 1;
    cluster.push_to(1, 1, b, 3.0);
    let line = cluster.links[1].take().unwrap();
    cluster.world.disconnect(line);
    cluster.world.input(1, ShardInput::OwnerLink { up: false });
    assert_eq!(cluster.push_to(0, 1, b, 3.0), ACCEPTED(0));
    cluster
}

/// The second shard, at step 1, refuses to save step 0.
fn assert_refused(cluster: &mut ShardCluster, save: &Save) {
    let name = Text::clipped(save.name().to_string());
    let line = connect_peer(cluster, 1);
    let refusal = cluster.world.refused(line, message::SaveShard { name }.into());
    let Refusal::Unavailable { detail } = refusal else { panic!("{refusal}") };
    let said = "it has values of step 1, and kept none of step 0";
    assert_eq!(detail.to_string(), said);
}

#[test]
fn due_saves_do_not_pile_up() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = one_behind(folder.path());
    for _ in 0..20 {
        let save_request = SaverEvent::SaveRequested { ticket: PERIODIC_SAVE, user: Vec::new() };
        cluster.world.input(0, ShardInput::SaverEvent(save_request));
    }
    assert_eq!(request_save(&mut cluster), [] as [u64; 0]);
    let line = cluster.replicas[0].lines[0];
    let received = cluster.world.received.remove(&line).unwrap_or_default();
    assert!(received.is_empty(), "the request of the chief is not refused: {received:?}");
    cluster.link(1);
    assert_eq!(ordered_steps(&mut cluster), [1], "one of the due saves");
    let news = SaverEvent::Saved {
        requester: SaveRequester::Ticket(PERIODIC_SAVE),
        result: Err(CheckpointFault::Storage("no disk".to_owned())),
    };
    cluster.world.input(0, ShardInput::SaverEvent(news));
    assert_eq!(ordered_steps(&mut cluster), [1], "then the requested save");
}

#[test]
fn a_due_save_that_never_begins_is_reported_to_the_saver() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = one_behind(folder.path());
    for _ in 0..2 {
        let save_request = SaverEvent::SaveRequested { ticket: PERIODIC_SAVE, user: Vec::new() };
        cluster.world.input(0, ShardInput::SaverEvent(save_request));
    }
    cluster.pass(Duration::from_secs(61), &[0, 1]);
    let reports: Vec<String> = std::mem::take(&mut cluster.world.orders)
        .into_iter()
        .filter_map(|(_, order)| match order {
            SaverOrder::ReportSave { ticket: PERIODIC_SAVE, result } => {
                Some(result.unwrap_err().to_string())
            }
            _ => None,
        })
        .collect();
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert!(reports[0].contains("it has waited 60s"), "{reports:?}");
}

#[test]
fn a_save_request_ends_with_a_refusal_if_a_shard_stays_away() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = one_behind(folder.path());
    let line = cluster.replicas[0].lines[0];
    let request = cluster.world.say(line, message::Save {}.into());
    cluster.pass(Duration::from_secs(61), &[0, 1]);
    let Some(Message::Refused(refused)) = cluster.world.answer(line, request) else {
        panic!("the request still waits")
    };
    let said = refused.refusal.to_string();
    assert!(said.contains("it has waited 60s for step 0 to be applied by every shard"), "{said}");
    cluster.link(1);
    assert_eq!(ordered_steps(&mut cluster), [] as [u64; 0]);
}

#[test]
fn requests_of_disconnected_and_older_chiefs_are_not_saved() {
    for leaves in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let mut cluster = one_behind(folder.path());
        assert_eq!(request_save(&mut cluster), [] as [u64; 0]);
        match leaves {
            true => {
                let line = cluster.replicas[0].lines[0];
                cluster.world.disconnect(line);
            }
            false => {
                cluster.leave(0);
                let mut second = Peer { role: Role::Chief {}, ..worker(7) };
                cluster.world.join(0, &mut second);
            }
        }
        cluster.link(1);
        assert_eq!(ordered_steps(&mut cluster), [] as [u64; 0]);
    }
}
