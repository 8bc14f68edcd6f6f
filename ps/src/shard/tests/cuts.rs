//! A checkpoint of synchronous shards is of one step, while training goes on; of asynchronous ones the
//! step owner's part is.

use std::sync::Arc;
use std::time::Duration;

use pushpull_common::ids::{GlobalStep, RestoreEpoch};
use pushpull_common::protocol::message::{self, CheckpointId, Role};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Message, Outcome, Refusal};

use super::peers::{Peer, worker};
use super::synchronous::{ACCEPTED, Cluster, synchronous};
use super::world::Line;
use crate::aggregate::mode::Mode;
use crate::checkpoint::{CheckpointStorage, Contents, LocalDirectory, Save, ShardEntry, Training};
use crate::config::Checkpoints;
use crate::shard::Input;
use crate::shard::checkpoints::{Asker, DUE, News, Order};

/// Two shards and two replicas, with a place for checkpoints.
fn cluster(folder: &std::path::Path) -> (Cluster, Arc<dyn CheckpointStorage>) {
    cluster_of(folder, synchronous(2, 2))
}

fn cluster_of(folder: &std::path::Path, mode: Mode) -> (Cluster, Arc<dyn CheckpointStorage>) {
    let storage = || LocalDirectory::create(folder).unwrap();
    let checkpoints = Checkpoints::new(storage());
    let configure = |config: crate::config::PsConfig| config.checkpoints(checkpoints.clone());
    let mut cluster = Cluster::new(2, mode, configure);
    let storage: Arc<dyn CheckpointStorage> = Arc::new(storage());
    cluster.world.storage = Some(storage.clone());
    (cluster, storage)
}

/// Makes a step of the gradients 1 and 3.
fn step(cluster: &mut Cluster, step: u64) {
    let (a, b) = (cluster.token(0), cluster.token(1));
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(step));
    assert_eq!(cluster.push(1, b, 3.0), ACCEPTED(step));
}

/// The chief wishes for a checkpoint; its orders to the saver by now, as the steps they are of.
fn wish(cluster: &mut Cluster) -> Vec<u64> {
    let line = cluster.replicas[0].lines[0];
    cluster.world.say(line, message::Save {}.into());
    cluster.settle();
    ordered(cluster)
}

fn ordered(cluster: &mut Cluster) -> Vec<u64> {
    let orders = std::mem::take(&mut cluster.world.orders);
    let step = |(_, order)| match order {
        Order::Save { step, .. } => Some(step.0),
        _ => None,
    };
    orders.into_iter().filter_map(step).collect()
}

/// A task that asks shards for their parts.
fn asker(cluster: &mut Cluster, shard: usize) -> Line {
    let peer = Peer { role: Role::Peer {}, ..worker(80) };
    cluster.world.greet(shard, peer.hello(shard), false).unwrap().0
}

fn part(cluster: &mut Cluster, shard: usize, save: &Save) -> ShardEntry {
    let name = Text::clipped(save.name().to_string());
    let line = asker(cluster, shard);
    let request = cluster.world.say(line, message::SaveShard { name }.into());
    let entry = cluster.world.answer_body(line, request);
    serde_json::from_slice(&entry).unwrap()
}

#[test]
fn it_is_of_the_step_that_all_had_applied_whatever_is_applied_since() {
    let folder = tempfile::tempdir().unwrap();
    let (mut cluster, storage) = cluster(folder.path());
    step(&mut cluster, 0);
    // In the middle of the second step, of which one gradient is admitted.
    let (a, b) = (cluster.token(0), cluster.token(1));
    assert_eq!(cluster.push(0, a, 1.0), ACCEPTED(1));
    assert_eq!(wish(&mut cluster), [1]);
    let save = Save::begin(storage, RestoreEpoch(1), GlobalStep(1), None).unwrap();
    let early = part(&mut cluster, 1, &save);
    assert_eq!(cluster.push(1, b, 3.0), ACCEPTED(1));
    step(&mut cluster, 2);
    assert_eq!(cluster.values(3), (-6.0, -6.0));
    let late = part(&mut cluster, 0, &save);
    assert_eq!((early.gradients, late.gradients), (1, 1));
    publish_and_restore(&mut cluster, save, vec![late, early]);
    assert_eq!(cluster.values(1), (-2.0, -2.0), "both are of the first step");
}

/// Publishes a checkpoint of these parts, and has every shard restore it.
fn publish_and_restore(cluster: &mut Cluster, save: Save, shards: Vec<ShardEntry>) {
    let catalogue = cluster.world.catalogue.clone();
    let training = Training::by_one(&catalogue, "sgd", &[]);
    let name = save.name();
    let (epoch, step) = (RestoreEpoch(name.restore_epoch), GlobalStep(name.global_step));
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

/// An update by an asynchronous worker of all its shards.
fn update(cluster: &mut Cluster) {
    let grant = cluster.token(0);
    assert!(matches!(cluster.push(0, grant, 1.0), Some(Outcome::Applied { .. })));
}

#[test]
fn the_step_owners_part_of_an_asynchronous_one_has_the_updates_that_its_step_counts() {
    let folder = tempfile::tempdir().unwrap();
    let (mut cluster, storage) = cluster_of(folder.path(), Mode::Asynchronous);
    update(&mut cluster);
    assert_eq!(wish(&mut cluster), [1]);
    update(&mut cluster);
    let save = Save::begin(storage, RestoreEpoch(1), GlobalStep(1), None).unwrap();
    let parts = vec![part(&mut cluster, 0, &save), part(&mut cluster, 1, &save)];
    let gradients: Vec<u64> = parts.iter().map(|part| part.gradients).collect();
    assert_eq!(gradients, [1, 2], "another shard saves what it has when it is asked");
    publish_and_restore(&mut cluster, save, parts);
    cluster.replicas[0].sequence += 1;
    let line = cluster.replicas[0].lines[0];
    let request = cluster.world.say(line, message::TokenRequest { newest: 0.into() }.into());
    let Some(Message::Granted(granted)) = cluster.world.answer(line, request) else {
        panic!("there are more")
    };
    assert_eq!(granted.grant.step, GlobalStep(1));
}

#[test]
fn asynchronous_saves_come_one_at_a_time_and_only_so_many_wait() {
    let folder = tempfile::tempdir().unwrap();
    let (mut cluster, storage) = cluster_of(folder.path(), Mode::Asynchronous);
    update(&mut cluster);
    assert_eq!(wish(&mut cluster), [1]);
    for ticket in 1..=17 {
        let wished = News::Wished { ticket, user: Vec::new() };
        cluster.world.input(0, Input::News(wished));
    }
    let mut told = Vec::new();
    for (_, order) in std::mem::take(&mut cluster.world.orders) {
        let Order::Tell { ticket, result: Err(error) } = order else { panic!("{order:?}") };
        told.push((ticket, error));
    }
    assert_eq!(told, [(17, "cannot save now: 16 saves wait already".to_owned())]);
    // However long the first takes: that it goes on is the saver's business, and its cut is kept.
    cluster.pass(Duration::from_secs(100), &[0, 1]);
    update(&mut cluster);
    let save = Save::begin(storage, RestoreEpoch(1), GlobalStep(1), None).unwrap();
    assert_eq!(part(&mut cluster, 0, &save).gradients, 1);
    for _ in 1..=16 {
        assert_eq!(ordered(&mut cluster), [] as [u64; 0]);
        let news = News::Saved { asker: Asker::Ticket(100), result: Err("no disk".to_owned()) };
        cluster.world.input(0, Input::News(news));
        let orders = std::mem::take(&mut cluster.world.orders);
        let saves = orders.iter().filter(|(_, order)| matches!(order, Order::Save { .. }));
        assert_eq!(saves.count(), 1, "{orders:?}");
    }
}

#[test]
fn it_waits_until_every_shard_has_applied_the_step_and_for_the_one_before() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = one_behind(folder.path());
    assert_eq!(wish(&mut cluster), [] as [u64; 0], "one shard is at step 0, and one at step 1");
    cluster.link(1);
    assert_eq!(ordered(&mut cluster), [1]);
    assert_eq!(wish(&mut cluster), [] as [u64; 0], "one is being saved");
    step(&mut cluster, 1);
    let error = Err("the disk is full".to_owned());
    let news = News::Saved { asker: Asker::Ticket(1), result: error };
    cluster.world.input(0, Input::News(news));
    assert_eq!(ordered(&mut cluster), [2]);
}

#[test]
fn a_shard_that_has_gone_on_without_being_told_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let (mut cluster, storage) = cluster(folder.path());
    let line = cluster.links[1].take().unwrap();
    cluster.world.disconnect(line);
    assert_eq!(wish(&mut cluster), [0]);
    cluster.link(1);
    step(&mut cluster, 0);
    let save = Save::begin(storage, RestoreEpoch(1), GlobalStep(0), None).unwrap();
    assert_eq!(part(&mut cluster, 0, &save).gradients, 0);
    let name = Text::clipped(save.name().to_string());
    let line = asker(&mut cluster, 1);
    let refusal = cluster.world.refused(line, message::SaveShard { name }.into());
    let Refusal::Storage { detail } = refusal else { panic!("{refusal}") };
    let said = "it has values of step 1, and kept none of step 0";
    assert_eq!(detail.to_string(), said);
}

/// A cluster in which the other shard has a step still to apply: it holds the last gradient, and does
/// not hear that the step is committed.
fn one_behind(folder: &std::path::Path) -> Cluster {
    let (mut cluster, _) = cluster(folder);
    let (a, b) = (cluster.token(0), cluster.token(1));
    cluster.push(0, a, 1.0);
    cluster.replicas[1].sequence += 1;
    cluster.push_to(1, 1, b, 3.0);
    let line = cluster.links[1].take().unwrap();
    cluster.world.disconnect(line);
    cluster.world.input(1, Input::OwnerLink { up: false });
    assert_eq!(cluster.push_to(0, 1, b, 3.0), ACCEPTED(0));
    cluster
}

#[test]
fn saves_that_are_due_do_not_pile_up() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = one_behind(folder.path());
    for _ in 0..20 {
        let wished = News::Wished { ticket: DUE, user: Vec::new() };
        cluster.world.input(0, Input::News(wished));
    }
    assert_eq!(wish(&mut cluster), [] as [u64; 0]);
    let line = cluster.replicas[0].lines[0];
    let heard = cluster.world.heard.remove(&line).unwrap_or_default();
    assert!(heard.is_empty(), "there is room for who asks: {heard:?}");
    cluster.link(1);
    assert_eq!(ordered(&mut cluster), [1], "one of them");
    let news = News::Saved { asker: Asker::Ticket(DUE), result: Err("no disk".to_owned()) };
    cluster.world.input(0, Input::News(news));
    assert_eq!(ordered(&mut cluster), [1], "and the one that was asked for");
}

#[test]
fn the_saver_hears_of_a_save_that_is_due_and_never_begins() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = one_behind(folder.path());
    for _ in 0..2 {
        let wished = News::Wished { ticket: DUE, user: Vec::new() };
        cluster.world.input(0, Input::News(wished));
    }
    cluster.pass(Duration::from_secs(61), &[0, 1]);
    let told: Vec<String> = std::mem::take(&mut cluster.world.orders)
        .into_iter()
        .filter_map(|(_, order)| match order {
            Order::Tell { ticket: DUE, result } => Some(result.unwrap_err()),
            _ => None,
        })
        .collect();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("it has waited 60s"), "{told:?}");
}

#[test]
fn whoever_waits_for_a_shard_that_does_not_come_back_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = one_behind(folder.path());
    let line = cluster.replicas[0].lines[0];
    let request = cluster.world.say(line, message::Save {}.into());
    cluster.pass(Duration::from_secs(61), &[0, 1]);
    let Some(Message::Refused(refused)) = cluster.world.answer(line, request) else {
        panic!("it waits for ever")
    };
    let said = refused.refusal.to_string();
    assert!(said.contains("it has waited 60s for step 0 to be applied by every shard"), "{said}");
    cluster.link(1);
    assert_eq!(ordered(&mut cluster), [] as [u64; 0]);
}

#[test]
fn nothing_is_saved_for_who_is_gone_nor_for_an_older_chief() {
    for leaves in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let mut cluster = one_behind(folder.path());
        assert_eq!(wish(&mut cluster), [] as [u64; 0]);
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
        assert_eq!(ordered(&mut cluster), [] as [u64; 0]);
    }
}
