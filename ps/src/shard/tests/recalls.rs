//! Recalled tokens in asynchronous mode: no shard applies a gradient that the step owner refuses.
//! Time is virtual.

use std::time::Duration;

use pushpull_common::protocol::message::EndReason;
use pushpull_common::protocol::{Grant, Message, Outcome, Refusal, message};

use super::synchronous::ShardCluster;
use crate::config::{Mode, PsConfig};

const LEASE: Duration = Duration::from_secs(5);
const TIMEOUT: Duration = Duration::from_secs(60);

/// Two shards and three replicas. The tests recall the tokens of the second replica.
fn cluster(configure: impl Fn(PsConfig) -> PsConfig) -> ShardCluster {
    ShardCluster::new(2, Mode::default(), |config| configure(config).inbox_pushes(3))
}

/// Returns how many gradients each shard has applied.
fn applied(cluster: &mut ShardCluster) -> [u64; 2] {
    let applied = |shard: usize| cluster.world.counters[shard].gradients_applied.read();
    [applied(0), applied(1)]
}

fn taken_back(cluster: &ShardCluster) -> u64 {
    cluster.world.metrics().tokens_taken_back
}

/// Pushes to one shard as the second replica, under its present sequence.
fn push_to(cluster: &mut ShardCluster, shard: usize, grant: Grant) -> Result<Outcome, Refusal> {
    let line = cluster.replicas[1].lines[shard];
    let sequence = cluster.replicas[1].sequence;
    let push_slot = cluster.world.push_slot(line);
    let push = super::peers::Push::gradient(sequence, grant, push_slot);
    let body = match shard {
        0 => super::peers::bytes_of(&[1_f32; 3]),
        _ => super::peers::bytes_of(&[1_f64; 2]),
    };
    let request = cluster.world.push(line, &push, &[(0, &body)]);
    cluster.settle();
    match cluster.world.answer(line, request) {
        Some(Message::PushAnswer(answer)) => Ok(answer.outcome),
        Some(Message::Refused(refused)) => Err(refused.refusal),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_lost_clients_token_is_taken_back_once_the_other_shard_has_closed_its_connection() {
    let mut cluster = cluster(|config| config);
    let grant = cluster.token(1);
    let other = cluster.replicas[1].lines[1];
    // Only the step owner misses its heartbeats: the client still lives as far as the other shard
    // knows.
    let alive = [cluster.replicas[0].lines.clone(), vec![other], cluster.peer_lines()].concat();
    cluster.world.pass(LEASE, &alive);
    assert!(!cluster.world.closed.contains(&other) && taken_back(&cluster) == 0);
    cluster.settle();
    assert!(cluster.world.closed.contains(&other), "a push that is under way there cannot arrive");
    assert_eq!(taken_back(&cluster), 1);
    // The client continues, and pushes to the step owner first.
    cluster.connect(1);
    cluster.replicas[1].sequence = 1;
    let refusal = push_to(&mut cluster, 0, grant).unwrap_err();
    assert!(matches!(refusal, Refusal::Token { .. }), "{refusal}");
    assert_eq!(applied(&mut cluster), [0, 0]);
}

#[test]
fn a_push_that_another_shard_has_applied_keeps_its_token() {
    let mut cluster = cluster(|config| config.last_step(1));
    let grant = cluster.token(1);
    cluster.replicas[1].sequence = 1;
    assert!(matches!(push_to(&mut cluster, 1, grant), Ok(Outcome::Applied { .. })));
    // The client is cut off from the step owner for longer than its lease.
    cluster.pass(LEASE * 2, &[0, 2]);
    assert_eq!((taken_back(&cluster), cluster.world.metrics().members_lost), (0, 2));
    assert_eq!(cluster.try_token(0), Ok(None), "the last step is promised");
    cluster.connect(1);
    assert!(
        matches!(push_to(&mut cluster, 0, grant), Ok(Outcome::Applied { step, .. }) if step.0 == 1)
    );
    assert_eq!(applied(&mut cluster), [1, 1]);
    let ended = message::Ended { reason: EndReason::LastStep {} }.into();
    assert_eq!(cluster.try_token(2), Err(ended));
}

#[test]
fn a_token_is_not_taken_back_while_a_shard_cannot_be_asked() {
    let mut cluster = cluster(|config| config);
    cluster.token(1);
    let link = cluster.links[1].take().unwrap();
    cluster.world.disconnect(link);
    cluster.pass(LEASE * 4, &[0, 2]);
    assert_eq!((taken_back(&cluster), cluster.world.metrics().clients_retired), (0, 0));
    let shard = &cluster.world.shards[0];
    let awaited = shard.awaited_tokens(cluster.world.now, None).text;
    assert!(
        awaited.starts_with("the answers of /job:ps/task:0/shard:1 (not connected"),
        "{awaited}"
    );
    cluster.link(1);
    cluster.pass(LEASE, &[0, 2]);
    assert_eq!(taken_back(&cluster), 1);
}

#[test]
fn a_gradient_computed_for_longer_than_the_token_timeout_counts_nowhere() {
    let mut cluster = cluster(|config| config.token_timeout(Some(TIMEOUT)));
    let grant = cluster.token(1);
    let other = cluster.replicas[1].lines[1];
    cluster.pass(TIMEOUT, &[0, 1, 2]);
    assert_eq!((taken_back(&cluster), cluster.world.metrics().members_lost), (1, 0));
    assert!(cluster.world.closed.contains(&other), "the client must connect again");
    cluster.connect(1);
    cluster.replicas[1].sequence = 1;
    assert!(matches!(push_to(&mut cluster, 0, grant), Err(Refusal::Token { .. })));
    assert_eq!(applied(&mut cluster), [0, 0]);
    // The next token that it requests is a new one.
    let next = cluster.token(1);
    assert!(next.token > grant.token);
    assert!(push_to(&mut cluster, 0, next).is_ok() && push_to(&mut cluster, 1, next).is_ok());
}

#[test]
fn a_client_that_comes_back_is_not_granted_a_token_that_is_being_recalled() {
    let mut cluster = cluster(|config| config);
    let grant = cluster.token(1);
    let link = cluster.links[1].take().unwrap();
    cluster.world.disconnect(link);
    cluster.pass(LEASE * 2, &[0, 2]);
    cluster.connect(1);
    // The client claims to know of no token.
    let line = cluster.replicas[1].lines[0];
    let request = cluster.world.say(line, message::TokenRequest { newest: 0.into() }.into());
    let Some(Message::Granted(granted)) = cluster.world.answer(line, request) else {
        panic!("no token is granted")
    };
    assert!(granted.grant.token > grant.token);
}

#[test]
fn a_client_that_is_back_and_waits_is_not_retired() {
    let mut cluster = cluster(|config| config.last_step(1));
    let grant = cluster.token(1);
    cluster.replicas[1].sequence = 1;
    assert!(push_to(&mut cluster, 1, grant).is_ok());
    cluster.pass(LEASE * 2, &[0, 2]);
    assert_eq!(cluster.world.metrics().members_lost, 2);
    cluster.connect(1);
    // The step owner has no push slot for its part for a long time.
    cluster.pass(LEASE * 10, &[0, 1, 2]);
    assert_eq!(cluster.world.metrics().clients_retired, 0);
    // The client is lost again, and has as much time as any other.
    cluster.pass(LEASE * 2, &[0, 2]);
    assert_eq!(cluster.world.metrics().clients_retired, 0);
    cluster.connect(1);
    assert!(push_to(&mut cluster, 0, grant).is_ok());
    assert_eq!(applied(&mut cluster), [1, 1]);
}

#[test]
fn a_client_that_died_with_a_half_applied_push_is_retired() {
    let mut cluster = cluster(|config| config.last_step(1));
    let grant = cluster.token(1);
    cluster.replicas[1].sequence = 1;
    assert!(push_to(&mut cluster, 1, grant).is_ok());
    cluster.pass(LEASE, &[0, 2]);
    assert_eq!(taken_back(&cluster), 0, "its worker may come back");
    cluster.pass(LEASE * 3, &[0, 2]);
    assert_eq!(cluster.world.metrics().clients_retired, 1);
    // Another replica makes the last step, so no wait is endless.
    let last = cluster.token(2);
    assert_eq!(
        cluster.push(2, last, 1.0),
        Some(Outcome::Applied { version: 1, step: 1.into(), staleness: 0 })
    );
    // This run of the client has ended. If it comes back, it joins again with another incarnation.
    let peer = cluster.replicas[1].peer.clone();
    let refusal = cluster.world.try_join(1, &mut peer.clone()).unwrap_err();
    assert!(matches!(refusal, Refusal::Busy { .. }), "only the step owner knows more: {refusal}");
    let refusal = cluster.world.try_join(0, &mut peer.clone()).unwrap_err();
    assert!(matches!(refusal, Refusal::UnknownEpoch { .. }), "{refusal}");
    cluster.restart(1);
    let refusal = cluster.world.try_join(0, &mut peer.clone()).unwrap_err();
    assert!(matches!(refusal, Refusal::Fenced { .. }), "a newer one has joined: {refusal}");
}

#[test]
fn a_newer_incarnation_frees_the_tokens_of_the_older_one_at_once() {
    let mut cluster = cluster(|config| config.last_step(1));
    cluster.token(1);
    cluster.restart(1);
    assert_eq!(taken_back(&cluster), 1);
    cluster.token(1);
}

#[test]
fn the_token_of_a_leaving_client_is_recalled_as_well() {
    let mut cluster = cluster(|config| config.last_step(1));
    cluster.token(1);
    let other = cluster.replicas[1].lines[1];
    let line = cluster.replicas[1].lines[0];
    assert!(matches!(cluster.world.ask(line, message::Leave {}.into()), Message::Left(_)));
    cluster.settle();
    assert!(cluster.world.closed.contains(&other));
    assert_eq!(taken_back(&cluster), 1);
    cluster.token(0);
}

#[test]
fn a_restarted_step_owner_recalls_again() {
    let mut cluster = cluster(|config| config.last_step(1));
    let grant = cluster.token(1);
    cluster.replicas[1].sequence = 1;
    assert!(push_to(&mut cluster, 1, grant).is_ok());
    let link = cluster.links[1].take().unwrap();
    cluster.world.disconnect(link);
    cluster.pass(LEASE, &[0, 2]);
    cluster.kill_shard(0);
    cluster.pass(LEASE / 2, &[0, 2]);
    assert_eq!(taken_back(&cluster), 0);
    cluster.connect(1);
    assert!(push_to(&mut cluster, 0, grant).is_ok());
    assert_eq!(applied(&mut cluster), [1, 1]);
}

#[test]
fn a_restarted_shard_knows_what_it_has_applied() {
    let mut cluster = cluster(|config| config.last_step(1));
    let grant = cluster.token(1);
    cluster.replicas[1].sequence = 1;
    assert!(push_to(&mut cluster, 1, grant).is_ok());
    cluster.kill_shard(1);
    cluster.pass(LEASE * 2, &[0, 2]);
    assert_eq!(taken_back(&cluster), 0);
}
