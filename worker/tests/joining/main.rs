//! The chief joins servers in every state that a crash can leave them in, and servers that die
//! while it does. The servers are a few lines each that keep account of what they are asked.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]

mod server;

use pushpull_common::catalogue::Catalogue;
use pushpull_common::cluster::ClusterSpec;
use pushpull_common::ids::{GlobalStep, RestoreEpoch, TaskId};
use pushpull_common::placement::{Placement, PlacementStrategy, ShardMap};
use pushpull_common::protocol::message::CheckpointId;
use pushpull_common::protocol::wire::Text;
use pushpull_common::variable::VariableSpec;
use pushpull_worker::blocking::Worker;
use pushpull_worker::{Error, JoinError, WorkerConfig};

use server::{Left, Server, State};

fn variables() -> Vec<VariableSpec> {
    ["a", "b"].map(|name| VariableSpec::f32(name, [3]).unwrap()).to_vec()
}

/// A shard that holds the variables with values, in this epoch and at this step.
fn ready(epoch: u32, step: u64) -> State {
    let map = ShardMap::new(vec![0, 1], 1).unwrap();
    let placement = Placement::plan(&variables(), &map, &PlacementStrategy::RoundRobin).unwrap();
    let catalogue = Some(Catalogue::new(variables(), &placement).unwrap());
    let (epoch, step) = (RestoreEpoch(epoch), GlobalStep(step));
    State { catalogue, ready: true, epoch, step, ..State::default() }
}

fn checkpoint() -> CheckpointId {
    CheckpointId { name: Text::clipped("c"), epoch: RestoreEpoch(1), step: GlobalStep(7) }
}

/// Two servers in these states, whose owner may know a checkpoint.
fn start(states: [State; 2], known: Option<CheckpointId>) -> [Server; 2] {
    let [owner, other] = states;
    [Server::start(0, State { checkpoint: known, ..owner }), Server::start(1, other)]
}

fn connect(servers: &[Server; 2]) -> Worker {
    let [owner, other] = servers;
    let cluster = format!("ps={},{};worker=127.0.0.1:1", owner.address, other.address);
    let cluster: ClusterSpec = cluster.parse().unwrap();
    Worker::connect(WorkerConfig::new(cluster, TaskId::worker(0))).unwrap()
}

/// What became of a join: whether `fill` was called, and the step and epoch that were restored.
type Joined = Result<(bool, Option<(u64, u32)>), JoinError>;

fn join(servers: &[Server; 2]) -> Joined {
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
fn were_asked(servers: &[Server; 2], expected: [&[&str]; 2]) {
    assert_eq!(servers[0].state().asked, expected[0], "the owner");
    assert_eq!(servers[1].state().asked, expected[1], "the other");
}

#[test]
fn fresh_servers_are_initialized() {
    let servers = start([State::default(), State::default()], None);
    assert_eq!(join(&servers).unwrap(), (true, None));
    let owner = ["declare", "find", "initialize in 1"];
    were_asked(&servers, [&owner, &["declare", "assign", "initialize in 1"]]);
}

#[test]
fn living_values_are_kept_whether_there_is_a_checkpoint_or_not() {
    for known in [None, Some(checkpoint())] {
        let servers = start([ready(2, 9), ready(2, 0)], known);
        assert_eq!(join(&servers).unwrap(), (false, None));
        were_asked(&servers, [&["declare"], &["declare"]]);
    }
}

#[test]
fn what_one_has_lost_is_restored_on_all() {
    let restore = ["declare", "restore c in 3"];
    let owner = ["declare", "find", "restore c in 3"];
    for states in [[ready(2, 9), State::default()], [State::default(), ready(2, 0)]] {
        let servers = start(states, Some(checkpoint()));
        assert_eq!(join(&servers).unwrap(), (false, Some((7, 3))));
        were_asked(&servers, [&owner, &restore]);
    }
}

#[test]
fn where_all_have_lost_all_the_epoch_is_above_that_of_the_checkpoint() {
    let servers = start([State::default(), State::default()], Some(checkpoint()));
    assert_eq!(join(&servers).unwrap(), (false, Some((7, 2))));
    were_asked(&servers, [&["declare", "find", "restore c in 2"], &["declare", "restore c in 2"]]);
}

#[test]
fn what_one_has_lost_without_a_checkpoint_is_lost() {
    let servers = start([ready(1, 9), State::default()], None);
    let JoinError::Session(Error::StateLost { shard }) = join(&servers).unwrap_err() else {
        panic!()
    };
    assert_eq!(shard.task, 1);
    were_asked(&servers, [&["declare", "find"], &["declare"]]);
}

#[test]
fn an_initialization_that_was_interrupted_is_gone_on_with() {
    let servers = start([ready(1, 0), State::default()], None);
    assert_eq!(join(&servers).unwrap(), (true, None));
    were_asked(&servers, [&["declare", "find"], &["declare", "assign", "initialize in 1"]]);
}

#[test]
fn a_server_that_dies_before_its_first_values_is_declared_again() {
    let dying = |kind| State { dies_at: [(kind, Left::Nothing)].into(), ..State::default() };
    let servers = start([State::default(), dying("Initialize")], None);
    assert_eq!(join(&servers).unwrap(), (true, None));
    let owner = ["declare", "find", "initialize in 1", "declare", "find"];
    let other = ["declare", "assign", "dies at Initialize", "initialize in 1"];
    were_asked(
        &servers,
        [&owner, &[&other[..], &["declare", "assign", "initialize in 1"]].concat()],
    );

    let servers = start([dying("Initialize"), State::default()], None);
    assert_eq!(join(&servers).unwrap(), (true, None));
    let owner = ["declare", "find", "dies at Initialize", "initialize in 1"];
    let again = ["declare", "find", "initialize in 1"];
    let other = ["declare", "assign", "declare", "assign", "initialize in 1"];
    were_asked(&servers, [&[&owner[..], &again].concat(), &other]);
}

#[test]
fn a_server_that_dies_while_it_is_restored_is_declared_and_restored_again() {
    let dies_at = [("Restore", Left::Nothing)].into();
    let servers = start([State::default(), State { dies_at, ..ready(4, 0) }], Some(checkpoint()));
    // The owner has begun the fifth epoch; all begin the sixth.
    assert_eq!(join(&servers).unwrap(), (false, Some((7, 6))));
    let owner = ["declare", "find", "restore c in 5"];
    let again = ["declare", "find", "restore c in 6"];
    let other = ["declare", "dies at Restore", "restore c in 5", "declare", "restore c in 6"];
    were_asked(&servers, [&[&owner[..], &again].concat(), &other]);
}

#[test]
fn a_restore_whose_answer_was_lost_is_not_taken_for_a_living_state() {
    // Only the last answer is lost: what is declared again lives in one epoch.
    let dies_at = [("Restore", Left::All)].into();
    let servers = start([State::default(), State { dies_at, ..ready(4, 0) }], Some(checkpoint()));
    assert_eq!(join(&servers).unwrap(), (false, Some((7, 5))));
    let owner = ["declare", "find", "restore c in 5", "declare"];
    were_asked(&servers, [&owner, &["declare", "restore c in 5", "restore c in 5", "declare"]]);
}

#[test]
fn a_save_hands_over_what_is_to_be_kept_and_nothing_that_is_too_long() {
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
