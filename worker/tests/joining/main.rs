//! The chief joins servers in every state that a crash can leave behind, and servers that crash
//! while it joins. The servers are scripted and log their requests.

#![allow(clippy::unwrap_used, reason = "a panic names the failing line")]

mod server;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::{GlobalStep, RestoreEpoch, TaskId};
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::protocol::Refusal;
use pushpull_common::protocol::message::CheckpointId;
use pushpull_common::protocol::wire::Text;
use pushpull_common::variable::VariableSpec;
use pushpull_worker::blocking::Worker;
use pushpull_worker::{Error, WorkerConfig};

use server::{CrashKind, ScriptedServer, ServerState};

fn variables() -> Vec<VariableSpec> {
    ["a", "b"].map(|name| VariableSpec::f32(name, [3]).unwrap()).to_vec()
}

/// The state of a shard whose variables have values, in this epoch and at this step.
fn ready(epoch: u32, step: u64) -> ServerState {
    let map = ShardMap::new(vec![0, 1], 1).unwrap();
    let placement = Placement::plan(&variables(), &map, &PlacementStrategy::RoundRobin).unwrap();
    let catalogue = Some(Catalogue::new(variables(), &placement).unwrap());
    let epoch = RestoreEpoch(epoch);
    let step = GlobalStep(step);
    ServerState { catalogue, ready: true, epoch, step, ..ServerState::default() }
}

fn checkpoint() -> CheckpointId {
    CheckpointId { name: Text::clipped("c"), epoch: RestoreEpoch(1), step: GlobalStep(7) }
}

/// Starts two servers in these states. The owner may know a checkpoint.
fn start(states: [ServerState; 2], known: Option<CheckpointId>) -> [ScriptedServer; 2] {
    let [owner, other] = states;
    [
        ScriptedServer::start(0, ServerState { checkpoint: known, ..owner }),
        ScriptedServer::start(1, other),
    ]
}

fn connect(servers: &[ScriptedServer; 2]) -> Worker {
    let [owner, other] = servers;
    let cluster = format!("ps={},{};worker=127.0.0.1:1", owner.address, other.address);
    let cluster: ClusterSpec = cluster.parse().unwrap();
    Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap()
}

/// Whether `fill` was called, and the step and the epoch that were restored.
type JoinOutcome = Result<(bool, Option<(u64, u32)>), Error>;

fn join(servers: &[ScriptedServer; 2]) -> JoinOutcome {
    let mut worker = connect(servers);
    let mut filled = false;
    worker.join(&variables(), |initial| {
        filled = true;
        initial.set("b", &[1.0_f32, 2.0, 3.0]);
    })?;
    let restored = worker.restored();
    assert!(restored.is_none_or(|restored| restored.name == "c"));
    let passed_over = restored.and_then(|restored| restored.passed_over.first());
    assert_eq!(passed_over.is_some(), restored.is_some());
    assert!(passed_over.is_none_or(|passed_over| passed_over.checkpoint == "ckpt-9-9"));
    Ok((filled, restored.map(|restored| (restored.step, restored.epoch))))
}

#[track_caller]
fn assert_requests(servers: &[ScriptedServer; 2], expected: [&[&str]; 2]) {
    assert_eq!(servers[0].state().requests, expected[0], "requests to the owner");
    assert_eq!(servers[1].state().requests, expected[1], "requests to the other");
}

#[test]
fn fresh_servers_are_initialized() {
    let servers = start([ServerState::default(), ServerState::default()], None);
    assert_eq!(join(&servers).unwrap(), (true, None));
    let owner = ["declare", "find", "initialize in 1"];
    assert_requests(&servers, [&owner, &["declare", "assign", "initialize in 1"]]);
}

#[test]
fn existing_values_are_kept_with_or_without_a_checkpoint() {
    for known in [None, Some(checkpoint())] {
        let servers = start([ready(2, 9), ready(2, 0)], known);
        assert_eq!(join(&servers).unwrap(), (false, None));
        assert_requests(&servers, [&["declare"], &["declare"]]);
    }
}

#[test]
fn a_state_lost_by_one_shard_is_restored_on_all() {
    let restore = ["declare", "prepare c", "restore c in 3"];
    let owner = ["declare", "find", "prepare c", "restore c in 3"];
    for states in [[ready(2, 9), ServerState::default()], [ServerState::default(), ready(2, 0)]] {
        let servers = start(states, Some(checkpoint()));
        assert_eq!(join(&servers).unwrap(), (false, Some((7, 3))));
        assert_requests(&servers, [&owner, &restore]);
    }
}

#[test]
fn no_shard_is_restored_if_one_refuses_the_checkpoint() {
    let refusing = |state| ServerState { refuses_checkpoint: true, ..state };
    let prepared = ["declare", "prepare c"];
    for owner_refuses in [false, true] {
        let owner = ready(2, 9);
        let other = ServerState::default();
        let states = match owner_refuses {
            true => [refusing(owner), other],
            false => [owner, refusing(other)],
        };
        let servers = start(states, Some(checkpoint()));
        let error = join(&servers).unwrap_err();
        let Error::Refused { doing, shard, refusal: Refusal::Storage { .. } } = &error else {
            panic!("{error}")
        };
        assert_eq!((*doing, shard.task), ("check the checkpoint", u32::from(!owner_refuses)));
        let expected: [&[&str]; 2] = match owner_refuses {
            true => [&["declare", "find", "refuse"], &prepared],
            false => [&["declare", "find", "prepare c"], &["declare", "refuse"]],
        };
        assert_requests(&servers, expected);
        assert_eq!(servers[0].state().epoch, RestoreEpoch(2), "the owner trains on");
    }
}

#[test]
fn the_epoch_exceeds_that_of_the_checkpoint_if_all_shards_have_lost_their_state() {
    let servers = start([ServerState::default(), ServerState::default()], Some(checkpoint()));
    assert_eq!(join(&servers).unwrap(), (false, Some((7, 2))));
    let owner = ["declare", "find", "prepare c", "restore c in 2"];
    assert_requests(&servers, [&owner, &["declare", "prepare c", "restore c in 2"]]);
}

#[test]
fn a_state_lost_without_a_checkpoint_is_an_error() {
    let servers = start([ready(1, 9), ServerState::default()], None);
    let Error::NoCheckpoint { shard } = join(&servers).unwrap_err() else { panic!() };
    assert_eq!(shard.task, 1);
    assert_requests(&servers, [&["declare", "find"], &["declare"]]);
}

#[test]
fn an_interrupted_initialization_continues() {
    let servers = start([ready(1, 0), ServerState::default()], None);
    assert_eq!(join(&servers).unwrap(), (true, None));
    assert_requests(&servers, [&["declare", "find"], &["declare", "assign", "initialize in 1"]]);
}

#[test]
fn a_server_that_crashes_before_its_first_values_is_declared_again() {
    let crashing = |kind| ServerState {
        crashes_at: [(kind, CrashKind::LosesState)].into(),
        ..ServerState::default()
    };
    let servers = start([ServerState::default(), crashing("Initialize")], None);
    assert_eq!(join(&servers).unwrap(), (true, None));
    let owner = ["declare", "find", "initialize in 1", "declare", "find"];
    let other = ["declare", "assign", "crash at Initialize", "initialize in 1"];
    assert_requests(
        &servers,
        [&owner, &[&other[..], &["declare", "assign", "initialize in 1"]].concat()],
    );

    let servers = start([crashing("Initialize"), ServerState::default()], None);
    assert_eq!(join(&servers).unwrap(), (true, None));
    let owner = ["declare", "find", "crash at Initialize", "initialize in 1"];
    let again = ["declare", "find", "initialize in 1"];
    let other = ["declare", "assign", "declare", "assign", "initialize in 1"];
    assert_requests(&servers, [&[&owner[..], &again].concat(), &other]);
}

#[test]
fn a_server_that_crashes_during_a_restore_is_declared_and_restored_again() {
    let crashes_at = [("Restore", CrashKind::LosesState)].into();
    let servers = start(
        [ServerState::default(), ServerState { crashes_at, ..ready(4, 0) }],
        Some(checkpoint()),
    );
    // The owner is already in epoch 5, so all begin epoch 6.
    assert_eq!(join(&servers).unwrap(), (false, Some((7, 6))));
    let owner = ["declare", "find", "prepare c", "restore c in 5"];
    let again = ["declare", "find", "prepare c", "restore c in 6"];
    let crash = ["declare", "prepare c", "crash at Restore", "restore c in 5"];
    let other = [&crash[..], &["declare", "prepare c", "restore c in 6"]].concat();
    assert_requests(&servers, [&[&owner[..], &again].concat(), &other]);
}

#[test]
fn a_restore_whose_answer_was_lost_is_repeated() {
    // Only the last answer is lost: when declared again, both shards are in one epoch.
    let crashes_at = [("Restore", CrashKind::LosesAnswer)].into();
    let servers = start(
        [ServerState::default(), ServerState { crashes_at, ..ready(4, 0) }],
        Some(checkpoint()),
    );
    assert_eq!(join(&servers).unwrap(), (false, Some((7, 5))));
    let owner = ["declare", "find", "prepare c", "restore c in 5", "declare"];
    let other = ["declare", "prepare c", "restore c in 5", "restore c in 5", "declare"];
    assert_requests(&servers, [&owner, &other]);
}

#[test]
fn a_save_stores_user_data_up_to_the_limit() {
    let servers = start([ready(1, 9), ready(1, 0)], Some(checkpoint()));
    let mut chief = connect(&servers);
    let error = chief.save(b"too early").unwrap_err();
    assert_eq!(error, Error::NotJoined { doing: "save a checkpoint" });
    chief.join(&variables(), |_| ()).unwrap();
    let saved = chief.save(b"row 5").unwrap();
    assert_eq!((&saved.name[..], saved.step), ("c", 7));
    assert_eq!(servers[0].state().user, b"row 5");
    let limit = 1 << 20;
    chief.save(&vec![0; limit]).unwrap();
    let error = chief.save(&vec![0; limit + 1]).unwrap_err();
    assert_eq!(error, Error::UserBlob { bytes: limit as u64 + 1, limit: limit as u64 });
    assert_eq!(servers[0].state().user.len(), limit);
}
