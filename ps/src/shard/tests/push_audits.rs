//! Gradients of absent workers that are applied on some shards only, in asynchronous mode: they are
//! found, reported, and the training has no final values. Time is virtual.

use std::time::Duration;

use pushpull_common::data_set::DataSet;
use pushpull_common::ids::{ClientEpoch, RequestId, ShardId};
use pushpull_common::protocol::message::{EndReason, Role};
use pushpull_common::protocol::{Grant, Message, Outcome, Refusal, message};

use super::peers::{Push, bytes_of};
use super::synchronous::ShardCluster;
use super::world::ConnectionId;
use crate::config::{Mode, PsConfig};
use crate::event::Event;

const LEASE: Duration = Duration::from_secs(5);
const OWNER: ShardId = ShardId { task: 0, shard: 0 };
const OTHER: ShardId = ShardId { task: 0, shard: 1 };

/// Two shards and three replicas, of which the second one dies. The last step is the second.
fn cluster() -> ShardCluster {
    let configure = |config: PsConfig| config.last_step(2).inbox_pushes(3);
    ShardCluster::new(2, Mode::default(), configure)
}

/// Pushes to one shard as the second replica. On two shards it is the same push.
fn push_to(cluster: &mut ShardCluster, shard: usize, grant: Grant) {
    push_as(cluster, 1, shard, grant);
}

fn push_as(cluster: &mut ShardCluster, replica: usize, shard: usize, grant: Grant) {
    let line = cluster.replicas[replica].lines[shard];
    let push = Push::gradient(1, grant, cluster.world.push_slot(line));
    let body = if shard == 0 { bytes_of(&[1_f32; 3]) } else { bytes_of(&[1_f64; 2]) };
    let request = cluster.world.push(line, &push, &[(0, &body)]);
    cluster.settle();
    match cluster.world.answer(line, request) {
        Some(Message::PushAnswer(answer)) => {
            assert!(matches!(answer.outcome, Outcome::Applied { .. }), "{answer:?}");
        }
        other => panic!("{other:?}"),
    }
}

/// A token, and the shards that have applied its gradient, that have not, and that could not be
/// asked.
type Reported = (u64, Vec<ShardId>, Vec<ShardId>, Vec<ShardId>);

/// Returns the gradients that were reported as applied on some shards only.
fn reported(cluster: &mut ShardCluster) -> Vec<Reported> {
    let events = std::mem::take(&mut cluster.world.events);
    let reported = events.into_iter().filter_map(|(_, event)| match event {
        Event::PartlyApplied { task, token, applied, missing, unknown, .. } => {
            assert_eq!(&*task.job, "worker");
            Some((token, applied, missing, unknown))
        }
        _ => None,
    });
    let reported: Vec<_> = reported.collect();
    assert!(cluster.world.metrics().gradients_partly_applied >= reported.len() as u64);
    reported
}

/// Makes the remaining steps, and has the first and the third replica wait for the end.
fn end(cluster: &mut ShardCluster) -> [(ConnectionId, RequestId); 2] {
    while let Ok(Some(grant)) = cluster.try_token(0) {
        assert!(cluster.push(0, grant, 1.0).is_some());
    }
    [0, 2].map(|replica| {
        let line = cluster.replicas[replica].lines[0];
        (line, cluster.world.say(line, message::AwaitEnd {}.into()))
    })
}

fn answers(cluster: &mut ShardCluster, requests: [(ConnectionId, RequestId); 2]) -> Vec<Message> {
    cluster.settle();
    requests.iter().filter_map(|&(line, request)| cluster.world.answer(line, request)).collect()
}

fn ended() -> Message {
    message::Ended { reason: EndReason::LastStep {} }.into()
}

fn not_final(pushes: u64) -> Message {
    message::Refused { refusal: Refusal::NotFinal { pushes } }.into()
}

#[test]
fn the_end_waits_for_a_gradient_of_a_lost_worker_that_another_shard_lacks() {
    let mut cluster = cluster();
    let grant = cluster.token(1);
    push_to(&mut cluster, 0, grant);
    cluster.pass(LEASE, &[0, 2]);
    assert_eq!(cluster.world.metrics().members_lost, 2);
    let requests = end(&mut cluster);
    assert!(answers(&mut cluster, requests).is_empty(), "the values may still change");
    let shard = &cluster.world.shards[0];
    let awaited = shard.awaited_end(cluster.world.now).text;
    let expected = "the gradients of lost workers on all shards: /job:worker/task:1 (lost";
    assert!(awaited.starts_with(expected), "{awaited}");
    // The worker comes back and completes its push.
    cluster.connect(1);
    push_to(&mut cluster, 1, grant);
    let line = cluster.replicas[1].lines[0];
    cluster.world.ask(line, message::Leave {}.into());
    assert_eq!(answers(&mut cluster, requests), [ended(), ended()]);
    assert_eq!(reported(&mut cluster), []);
}

#[test]
fn a_gradient_that_stays_on_the_step_owner_is_reported_and_there_are_no_final_values() {
    let mut cluster = cluster();
    let grant = cluster.token(1);
    push_to(&mut cluster, 0, grant);
    cluster.pass(LEASE, &[0, 2]);
    let requests = end(&mut cluster);
    cluster.pass(LEASE, &[0, 2]);
    assert_eq!(reported(&mut cluster), [], "its worker may come back");
    cluster.pass(LEASE * 2, &[0, 2]);
    let expected = (grant.token.0, vec![OWNER], vec![OTHER], vec![]);
    assert_eq!(reported(&mut cluster), [expected]);
    assert_eq!(answers(&mut cluster, requests), [not_final(1), not_final(1)]);
    assert_eq!(cluster.world.metrics().clients_retired, 1);
    // This is durable.
    cluster.replicas[1].lines.clear();
    cluster.kill_shard(0);
    let requests = end(&mut cluster);
    assert_eq!(answers(&mut cluster, requests), [not_final(1), not_final(1)]);
}

#[test]
fn a_gradient_that_stays_on_another_shard_is_reported() {
    let mut cluster = cluster();
    let grant = cluster.token(1);
    push_to(&mut cluster, 1, grant);
    cluster.pass(LEASE * 4, &[0, 2]);
    let expected = (grant.token.0, vec![OTHER], vec![OWNER], vec![]);
    assert_eq!(reported(&mut cluster), [expected]);
    let requests = end(&mut cluster);
    assert_eq!(answers(&mut cluster, requests), [not_final(1), not_final(1)]);
}

#[test]
fn a_restarted_worker_joins_once_its_older_run_has_ended_on_every_shard() {
    for shard in [0, 1] {
        let mut cluster = cluster();
        let grant = cluster.token(1);
        push_to(&mut cluster, shard, grant);
        let old = cluster.replicas[1].peer.clone();
        let refusal = cluster.world.try_join(0, &mut old.restarted()).unwrap_err();
        assert!(matches!(refusal, Refusal::Busy { .. }), "{refusal}");
        cluster.settle();
        let (applied, missing) = if shard == 0 { (OWNER, OTHER) } else { (OTHER, OWNER) };
        let expected = (grant.token.0, vec![applied], vec![missing], vec![]);
        assert_eq!(reported(&mut cluster), [expected], "shard {shard}");
        // The older run can do no more, even if its process lives.
        let refusal = cluster.world.try_join(1, &mut old.clone()).unwrap_err();
        assert!(matches!(refusal, Refusal::Busy { .. }), "{refusal}");
        let refusal = cluster.world.try_join(0, &mut old.clone()).unwrap_err();
        assert!(matches!(refusal, Refusal::Fenced { .. }), "{refusal}");
        cluster.restart(1);
        cluster.token(1);
    }
}

/// A chief whose run was ended while it was away joins again, as a worker does.
#[test]
fn a_run_that_was_ended_while_it_was_away_is_told_to_join_again() {
    for (replica, others) in [(0, [1, 2]), (1, [0, 2])] {
        let mut cluster = cluster();
        cluster.connect(replica);
        let grant = cluster.token(replica);
        push_as(&mut cluster, replica, 0, grant);
        let old = cluster.replicas[replica].peer.clone();
        cluster.pass(LEASE * 4, &others);
        let refusal = cluster.world.try_join(1, &mut old.clone()).unwrap_err();
        assert!(matches!(refusal, Refusal::Busy { .. }), "replica {replica}: {refusal}");
        let refusal = cluster.world.try_join(0, &mut old.clone()).unwrap_err();
        let is_over = matches!(refusal, Refusal::UnknownEpoch { newest: ClientEpoch(0), .. });
        assert!(is_over, "replica {replica}: {refusal}");
        cluster.restart(replica);
        cluster.token(replica);
    }
}

/// A process that may not be the chief ends no run of the worker whose task it names.
#[test]
fn a_hello_that_is_refused_ends_no_run() {
    let mut cluster = cluster();
    let grant = cluster.token(1);
    push_to(&mut cluster, 0, grant);
    let mut other = cluster.replicas[1].peer.restarted();
    other.role = Role::Chief {};
    let refusal = cluster.world.try_join(0, &mut other).unwrap_err();
    assert!(matches!(refusal, Refusal::Busy { .. }), "{refusal}");
    cluster.settle();
    assert_eq!(reported(&mut cluster), []);
    push_to(&mut cluster, 1, grant);
    cluster.token(1);
}

#[test]
fn a_worker_that_dies_between_pushes_leaves_nothing_to_report() {
    let mut cluster = cluster();
    let grant = cluster.token(1);
    push_to(&mut cluster, 0, grant);
    push_to(&mut cluster, 1, grant);
    cluster.restart(1);
    cluster.token(1);
    cluster.pass(LEASE * 4, &[0, 2]);
    assert_eq!((reported(&mut cluster), cluster.world.metrics().clients_retired), (vec![], 0));
    let requests = end(&mut cluster);
    assert_eq!(answers(&mut cluster, requests), [ended(), ended()]);
}

#[test]
fn a_restarted_shard_and_a_restarted_step_owner_know_the_gradients_of_a_lost_worker() {
    for (killed, applied, missing) in [(0, OWNER, OTHER), (1, OTHER, OWNER)] {
        let mut cluster = cluster();
        let grant = cluster.token(1);
        push_to(&mut cluster, killed, grant);
        cluster.pass(LEASE, &[0, 2]);
        for line in std::mem::take(&mut cluster.replicas[1].lines) {
            cluster.world.disconnect(line);
        }
        cluster.kill_shard(0);
        cluster.kill_shard(1);
        cluster.pass(LEASE * 4, &[0, 2]);
        let expected = (grant.token.0, vec![applied], vec![missing], vec![]);
        assert_eq!(reported(&mut cluster), [expected], "{applied}");
    }
}

#[test]
fn a_chief_does_not_wait_for_a_shard_that_cannot_be_asked() {
    let mut cluster = cluster();
    cluster.replicas[0].peer.role = Role::Chief {};
    cluster.connect(0);
    let grant = cluster.token(0);
    push_as(&mut cluster, 0, 0, grant);
    let link = cluster.links[1].take().unwrap();
    cluster.world.disconnect(link);
    let mut newer = cluster.replicas[0].peer.restarted();
    cluster.world.try_join(0, &mut newer).unwrap();
    let expected = (grant.token.0, vec![OWNER], vec![], vec![OTHER]);
    assert_eq!(reported(&mut cluster), [expected]);
}

/// A batch whose gradient is on another shard only is not granted again: it would count twice there.
#[test]
fn the_batch_of_a_gradient_that_is_on_another_shard_is_not_granted_again() {
    let configure = |config: PsConfig| config.inbox_pushes(3);
    let mut cluster = ShardCluster::new(2, Mode::default(), configure);
    let set = DataSet::new("digits", 2, 1).unwrap().epochs(1);
    for replica in 0..3 {
        let line = cluster.replicas[replica].lines[0];
        cluster.world.ask(line, message::DeclareData::from(&set).into());
    }
    let grant = cluster.token(1);
    push_to(&mut cluster, 1, grant);
    cluster.restart(1);
    let rest = cluster.token(0);
    assert!(rest.samples.is_some() && rest.samples != grant.samples);
    assert!(cluster.push(0, rest, 1.0).is_some());
    let ended = message::Ended { reason: EndReason::DataEnd {} }.into();
    assert_eq!(cluster.try_token(0), Err(ended));
}

/// A complete push belongs to the server: it spends its token when it is applied, although its run
/// has ended on a shard that lacks it.
#[test]
fn a_run_that_ends_while_its_push_is_complete_but_not_applied_spends_its_token_once() {
    for is_chief in [false, true] {
        let mut cluster = cluster();
        if is_chief {
            cluster.replicas[0].peer.role = Role::Chief {};
        }
        cluster.connect(0);
        let grant = cluster.token(0);
        let line = cluster.replicas[0].lines[0];
        let push = Push::gradient(1, grant, cluster.world.push_slot(line));
        cluster.world.push(line, &push, &[(0, &bytes_of(&[1_f32; 3]))]);
        let mut newer = cluster.replicas[0].peer.restarted();
        let unknown = if is_chief {
            // The chief does not wait for a shard that cannot be asked.
            cluster.world.disconnect(cluster.links[1].take().unwrap());
            cluster.world.try_join(0, &mut newer).unwrap();
            vec![OTHER]
        } else {
            let refusal = cluster.world.try_join(0, &mut newer).unwrap_err();
            assert!(matches!(refusal, Refusal::Busy { .. }), "{refusal}");
            while cluster.deliver() {}
            // Nobody waits for the push of the run before.
            cluster.world.try_join(0, &mut newer).unwrap();
            vec![]
        };
        let missing = if is_chief { vec![] } else { vec![OTHER] };
        let expected = (grant.token.0, vec![OWNER], missing, unknown);
        assert_eq!(reported(&mut cluster), [expected], "chief: {is_chief}");
        assert_eq!(cluster.world.metrics().gradients_applied, 0, "chief: {is_chief}");
        cluster.settle();
        assert_eq!(cluster.world.metrics().gradients_applied, 1, "chief: {is_chief}");
        assert_eq!(cluster.world.shards[0].step().0, 1, "chief: {is_chief}");
    }
}
