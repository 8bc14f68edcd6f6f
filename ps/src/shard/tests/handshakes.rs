//! Handshakes: which clients a shard accepts, and what their roles permit.

use std::time::Duration;

use pushpull_common::cluster::ClusterSpec;
use pushpull_common::identity::Identity;
use pushpull_common::ids::{ClientEpoch, GlobalStep, RestoreEpoch, ShardId, TaskId};
use pushpull_common::protocol::message::{
    self, AuthOffer, BodyCrc, CatalogueState, FeatureOffer, Hello, Role,
};
use pushpull_common::protocol::wire::Text;
use pushpull_common::protocol::{Features, Message, Refusal, version};
use pushpull_optim::optimizer::Sgd;
use pushpull_store::planted::PlantedBugs;

use super::peers::{Peer, chief, identity, variables, worker};
use super::world::{LIFE, World};
use crate::config::{Network, PsConfig};
use crate::shard::TICK;

fn bare() -> World {
    World::bare(variables(), Sgd::new(1.0), |config| {
        config.network(Network::default().connections_max(3))
    })
}

#[test]
fn a_refused_client_learns_the_reason_and_is_closed() {
    let mut world = bare();
    let hello = worker(1).hello(0);
    let refusal = |world: &mut World, hello| world.handshake(0, hello, false).unwrap_err();

    let mut other = hello.clone();
    other.shard = ShardId { task: 0, shard: 7 };
    let wanted = other.shard;
    assert_eq!(refusal(&mut world, other), Refusal::WrongShard { wanted, task: 0, shards: 1 });

    let mut other = hello.clone();
    other.version_oldest = 7;
    other.version_newest = 9;
    let refused = Refusal::Version { oldest: version::OLDEST, newest: version::NEWEST };
    assert_eq!(refusal(&mut world, other), refused);

    let mut other = hello.clone();
    let theirs = Identity::new().with("ps", "0").with("optimizer", "adam");
    other.identity = theirs.to_wire();
    let Refusal::Identity { field, server, client, server_hash, client_hash } =
        refusal(&mut world, other)
    else {
        panic!("another identity is accepted")
    };
    assert_eq!((field.as_str(), server.as_str(), client.as_str()), ("optimizer", "sgd", "adam"));
    assert_eq!((server_hash, client_hash), (identity().hash(), theirs.hash()));

    for role in [Role::Rank {}, Role::Task {}] {
        let other = Hello { role, ..hello.clone() };
        let role = role.code();
        assert_eq!(refusal(&mut world, other), Refusal::Role { role, kind: 1 });
    }
    let client = Hello { role: Role::Client {}, ..hello.clone() };
    let text = refusal(&mut world, client).to_string();
    assert!(text.ends_with("this server offers no functions"), "{text}");

    let mut other = hello.clone();
    other.seen_epoch = RestoreEpoch(2);
    let found = RestoreEpoch(2);
    let current = RestoreEpoch(0);
    let step = GlobalStep(0);
    assert_eq!(refusal(&mut world, other), Refusal::RestoreEpoch { found, current, step });
    assert_eq!(world.members, [(0, 0)], "no member has joined");
}

#[test]
fn connections_beyond_the_limit_are_refused_until_one_closes() {
    let mut world = bare();
    let lines: Vec<_> = (0..3).map(|task| world.join(0, &mut worker(task))).collect();
    let refusal = world.try_join(0, &mut worker(3)).unwrap_err();
    assert!(matches!(refusal, Refusal::Busy { limit: 3, .. }), "{refusal}");
    world.disconnect(lines[1]);
    world.join(0, &mut worker(3));
}

#[test]
fn a_member_takes_the_place_of_a_reader_and_a_reader_that_of_nobody() {
    let mut world = bare();
    let readers: Vec<_> = (0..2)
        .map(|task| world.join(0, &mut Peer { role: Role::Reader {}, ..worker(task) }))
        .collect();
    world.join(0, &mut worker(1));
    let refusal = world.try_join(0, &mut Peer { role: Role::Reader {}, ..worker(9) }).unwrap_err();
    assert!(matches!(refusal, Refusal::Busy { limit: 3, .. }), "{refusal}");
    world.pass(TICK, &readers[..1]);
    for (task, silent) in [(2, readers[1]), (3, readers[0])] {
        world.join(0, &mut worker(task));
        assert!(world.closed.contains(&silent), "the one that was silent for longest");
    }
    let refusal = world.try_join(0, &mut worker(4)).unwrap_err();
    assert!(matches!(refusal, Refusal::Busy { limit: 3, .. }), "{refusal}");
    assert_eq!(world.metrics().readers_displaced, 2);
}

#[test]
fn readers_and_shards_that_are_silent_for_a_lease_lose_their_connections() {
    let lease = Duration::from_secs(1);
    let mut world = World::bare(variables(), Sgd::new(1.0), |config| {
        config.lease(lease).network(Network::default().connections_max(5))
    });
    let mut of_role = |role| world.join(0, &mut Peer { role, ..worker(0) });
    let [reader, silent] = [of_role(Role::Reader {}), of_role(Role::Reader {})];
    let mut peer = super::peers::worker(0).hello(0);
    peer.role = Role::Peer {};
    peer.job = Text::clipped("ps");
    let (shard, _) = world.handshake(0, peer, true).unwrap();
    let left = world.join(0, &mut worker(1));
    world.ask(left, message::Leave {}.into());
    let member = world.join(0, &mut worker(2));
    world.pass(lease - TICK, &[reader, member]);
    assert!(world.closed.is_empty(), "{:?}", world.closed);
    world.pass(2 * TICK, &[reader, member]);
    assert_eq!(world.closed, [silent, shard, left].into());
    assert_eq!(world.metrics().connections_silent, 3);
    // Their places are free.
    (3..6).for_each(|task| _ = world.join(0, &mut worker(task)));
}

#[test]
fn an_older_incarnation_is_fenced_by_its_successor() {
    an_older_incarnation_is_fenced(PlantedBugs::default());
}

pub(super) fn an_older_incarnation_is_fenced(planted: PlantedBugs) {
    let mut world =
        World::bare(variables(), Sgd::new(1.0), |config| PsConfig { planted, ..config });
    let mut first = worker(1);
    let line = world.join(0, &mut first);
    let mut second = first.restarted();
    world.join(0, &mut second);
    assert!(world.closed.contains(&line), "a task has one connection");
    let fenced = Refusal::Fenced { epoch: ClientEpoch(2), current: ClientEpoch(2) };
    assert_eq!(world.refused(line, message::Heartbeat {}.into()), fenced);
    let ghost = world.try_join(0, &mut first).unwrap_err();
    assert_eq!(ghost, Refusal::Fenced { epoch: ClientEpoch(1), current: ClientEpoch(2) });
    let mut liar = first.restarted().restarted();
    for epoch in [3, 1 << 32, (1 << 63) - 1, 1 << 63, u64::MAX].map(ClientEpoch) {
        liar.epoch = epoch;
        let refusal = world.try_join(0, &mut liar).unwrap_err();
        assert_eq!(refusal, Refusal::UnknownEpoch { epoch, newest: ClientEpoch(2) });
    }
    assert_eq!(world.join(0, &mut first.restarted().restarted()).shard, 0, "epochs continue");
}

/// If a shard accepted such an epoch, it would mint the next above it, and could not read back
/// what it writes.
#[test]
fn an_epoch_that_was_never_minted_harms_the_files_of_no_shard() {
    let last = (1 << 63) - 1;
    for role in [Role::Worker {}, Role::Chief {}] {
        let mut world = World::bare(variables(), Sgd::new(1.0), |config| config.shards(2));
        let mut honest = worker(1);
        world.join(0, &mut honest);
        for shard in [0, 1] {
            // A task that the shard knows, and one that it does not.
            for task in [1, 2] {
                for epoch in [last, last - 1, 1 << 62, 1 << 48].map(ClientEpoch) {
                    let mut liar = Peer { role, epoch, ..worker(task).restarted() };
                    liar.epoch = epoch;
                    let refusal = world.try_join(shard, &mut liar).unwrap_err();
                    let named = |newest: ClientEpoch| newest < epoch;
                    let right = matches!(refusal, Refusal::UnknownEpoch { epoch: found, newest }
                        if found == epoch && named(newest));
                    assert!(right, "{refusal}");
                }
            }
            world.restart(shard).unwrap();
        }
        world.join(0, &mut worker(3));
        [0, 1].into_iter().for_each(|shard| world.restart(shard).unwrap());
        // Epochs that were minted before the restart are still accepted.
        [0, 1].into_iter().for_each(|shard| _ = world.join(shard, &mut honest));
    }
}

/// A shard that mints no epochs accepts a false one, but none that is more than a day ahead.
#[test]
fn a_false_epoch_shuts_its_task_out_for_a_day_at_most() {
    let mut world = World::bare(variables(), Sgd::new(1.0), |config| config.shards(2));
    let mut honest = worker(1);
    [0, 1].into_iter().for_each(|shard| _ = world.join(shard, &mut honest));
    let ahead = ClientEpoch(crate::shard::peers::client_registry::EPOCHS_AHEAD);
    let mut liar = Peer { epoch: ahead, ..worker(1).restarted() };
    world.join(1, &mut liar);
    // Other tasks are not affected.
    let mut other = worker(2);
    [0, 1].into_iter().for_each(|shard| _ = world.join(shard, &mut other));
    let refusal = world.try_join(1, &mut honest).unwrap_err();
    assert!(matches!(refusal, Refusal::Fenced { current, .. } if current == ahead), "{refusal}");
    world.now += std::time::Duration::from_millis(ahead.0 + 1);
    let mut restarted = honest.restarted();
    [0, 1].into_iter().for_each(|shard| _ = world.join(shard, &mut restarted));
    assert!(restarted.epoch > ahead);
}

/// Each epoch belongs to one client: other shards tell by it which client made a push.
#[test]
fn the_epoch_of_another_task_is_refused_by_the_step_owner() {
    let mut world = bare();
    let mut first = worker(1);
    world.join(0, &mut first);
    let mut liar = Peer { epoch: first.epoch, ..worker(2) };
    let refusal = world.try_join(0, &mut liar).unwrap_err();
    let epoch = first.epoch;
    let newest = ClientEpoch(0);
    assert_eq!(refusal, Refusal::UnknownEpoch { epoch, newest });
}

#[test]
fn a_shard_that_mints_no_epochs_accepts_those_of_the_step_owner() {
    let mut world = World::bare(variables(), Sgd::new(1.0), |config| config.shards(2));
    let mut peer = worker(1);
    let refusal = world.try_join(1, &mut peer).unwrap_err();
    assert!(matches!(refusal, Refusal::Fenced { .. }), "it has no epoch yet: {refusal}");
    world.join(0, &mut peer);
    assert_eq!(peer.epoch, ClientEpoch(1));
    let line = world.join(1, &mut peer);
    let newest = pushpull_common::ids::TokenId(0);
    for message in [message::TokenRequest { newest }.into(), message::AwaitEnd {}.into()] {
        let refusal = world.refused(line, message);
        assert!(matches!(refusal, Refusal::Unsupported { .. }), "not the step owner: {refusal}");
    }
}

#[test]
fn the_welcome_states_the_agreed_settings() {
    let mut world = bare();
    for (asked, remote, agreed) in [
        (BodyCrc::Auto {}, false, BodyCrc::Off {}),
        (BodyCrc::Auto {}, true, BodyCrc::On {}),
        (BodyCrc::On {}, false, BodyCrc::On {}),
        (BodyCrc::Off {}, true, BodyCrc::Off {}),
    ] {
        let mut hello = worker(1).hello(0);
        hello.body_crc = asked;
        let (line, welcome) = world.handshake(0, hello, remote).unwrap();
        assert_eq!(welcome.body_crc, agreed);
        assert_eq!((welcome.lease_ms, welcome.shards), (5000, 1));
        assert_eq!(welcome.catalogue, CatalogueState::Absent {});
        world.disconnect(line);
    }
}

/// A server that lost its state may count the same restore epoch again.
#[test]
fn a_client_of_another_state_in_the_same_epoch_is_told_so() {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let epoch = RestoreEpoch(1);
    let seen = |peer: &Peer, seen_arena| Hello { seen_epoch: epoch, seen_arena, ..peer.hello(0) };
    let mut member = worker(1);
    world.join(0, &mut member);
    for peer in [&member, &worker(2), &chief()] {
        let refusal = world.handshake(0, seen(peer, LIFE.arena + 1), false).unwrap_err();
        let found = epoch;
        let current = epoch;
        let step = GlobalStep(0);
        assert_eq!(refusal, Refusal::RestoreEpoch { found, current, step }, "{:?}", peer.role);
    }
    let (line, welcome) = world.handshake(0, seen(&member, LIFE.arena), false).unwrap();
    assert_eq!((welcome.restore_epoch, welcome.arena), (epoch, LIFE.arena));
    world.disconnect(line);
    // A client that has not joined knows no state. A reader compares the states itself.
    let newcomer = Hello { seen_arena: LIFE.arena + 1, ..worker(2).hello(0) };
    let reader = Peer { role: Role::Reader {}, ..worker(3) };
    for hello in [newcomer, seen(&reader, LIFE.arena + 1)] {
        let (_, welcome) = world.handshake(0, hello, false).unwrap();
        assert_eq!((welcome.restore_epoch, welcome.arena), (epoch, LIFE.arena));
    }
}

#[test]
fn roles_are_checked_for_every_message() {
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| config);
    let mut reader = worker(9);
    reader.role = Role::Reader {};
    let reader = world.join(0, &mut reader);
    let worker = world.join(0, &mut worker(1));
    for message in
        [message::Initialize { epoch: RestoreEpoch(1) }.into(), message::Finish {}.into()]
    {
        let kind = Message::kind(&message);
        assert_eq!(world.refused(worker, message), Refusal::Role { role: 1, kind });
    }
    for message in [message::Reserve {}.into(), message::Leave {}.into()] {
        let kind = Message::kind(&message);
        assert_eq!(world.refused(reader, message), Refusal::Role { role: 3, kind });
    }
    assert_eq!(world.values(reader).len(), 56, "it may read");
    let left = world.refused(worker, message::Left {}.into());
    assert!(matches!(left, Refusal::Role { kind: 53, .. }), "{left}");
    let ring = world.refused(worker, message::RingLinked { memory: 0 }.into());
    assert_eq!(ring, Refusal::Role { role: 1, kind: 103 });
}

/// A world whose cluster lists these tasks, and accepts others of its jobs if it is elastic.
fn world_of(cluster: &str, elastic: bool) -> World {
    World::bare(variables(), Sgd::new(1.0), |config| {
        let cluster: ClusterSpec = cluster.parse().unwrap();
        let task = TaskId::new(cluster.variables_job().unwrap(), 0);
        PsConfig { cluster, task, ..config }.elastic_workers(elastic)
    })
}

/// Checks which tasks are accepted, by the role, the job and the index that they claim.
#[test]
fn only_tasks_of_the_cluster_are_accepted() {
    let only = "ps=a:1";
    let dense = "ps=a:1,b:1;worker=c:1,d:1";
    let sparse = "ps=a:1;worker=3@c:1;evaluator=d:1";
    let local = "local=a:1,b:1";
    let beside = "local=a:1,b:1;worker=c:1";
    let worker = Role::Worker {};
    let chief = Role::Chief {};
    let peer = Role::Peer {};
    let table = [
        // A cluster that lists no workers does not restrict them.
        (only, false, worker, "worker", 7, true),
        (only, false, chief, "anything", 1 << 31, true),
        (only, false, worker, "ps", 0, false),
        (dense, false, worker, "worker", 1, true),
        (dense, false, chief, "worker", 0, true),
        (dense, false, worker, "worker", 2, false),
        (dense, false, chief, "worker", u32::MAX, false),
        (dense, false, worker, "chief", 0, false),
        (dense, false, worker, "", 0, false),
        (sparse, false, worker, "worker", 3, true),
        (sparse, false, worker, "worker", 0, false),
        (sparse, false, worker, "evaluator", 0, true),
        // An elastic cluster accepts more tasks of its jobs, and no other jobs.
        (dense, true, worker, "worker", 2, true),
        (dense, true, worker, "chief", 0, false),
        (dense, true, worker, "ps", 0, false),
        (dense, false, peer, "ps", 1, true),
        // Another shard of the same task.
        (dense, false, peer, "ps", 0, true),
        (dense, true, peer, "ps", 2, false),
        (dense, false, peer, "worker", 0, false),
        (only, false, peer, "worker", 0, false),
        // Another job that holds the variables trains as well, and has its own tasks only.
        (local, false, worker, "local", 1, true),
        (local, false, worker, "local", 2, false),
        (local, true, worker, "local", 2, false),
        (local, false, chief, "worker", 0, true),
        (local, false, worker, "ps", 0, false),
        (local, false, peer, "local", 1, true),
        (local, false, peer, "local", 2, false),
        (local, false, peer, "ps", 1, false),
        (beside, false, worker, "local", 0, true),
        (beside, false, worker, "worker", 0, true),
        (beside, false, worker, "worker", 1, false),
        (beside, true, worker, "worker", 1, true),
        (beside, false, worker, "trainer", 0, false),
        // The functions of a task train by a client of their own, and never as the chief.
        (dense, false, worker, "worker:functions", 1, true),
        (dense, false, worker, "worker:functions", 2, false),
        (dense, true, worker, "worker:functions", 2, true),
        (dense, false, worker, "ps:functions", 0, false),
        (dense, false, worker, ":functions", 0, false),
        (dense, false, chief, "worker:functions", 0, false),
        (only, false, chief, "anything:functions", 0, false),
        (local, false, worker, "local:functions", 1, true),
        (local, true, worker, "local:functions", 2, false),
        // A client of functions declares variables in any cluster.
        (dense, false, chief, "client:declares", 0, true),
        (dense, false, chief, "client:declares", 1, false),
        (dense, false, worker, "client:declares", 0, false),
        // Readers are no tasks of a cluster.
        (dense, false, Role::Reader {}, "notebook", 9, true),
    ];
    for (cluster, elastic, role, job, task, welcome) in table {
        let mut world = world_of(cluster, elastic);
        let mut hello = worker_of(task).hello(0);
        hello.role = role;
        hello.job = Text::clipped(job);
        match world.handshake(0, hello, false) {
            Ok(_) => assert!(welcome, "{cluster}: {role:?} {job} {task}"),
            Err(Refusal::UnknownTask { job: named, task: index, detail }) => {
                assert!(!welcome, "{cluster}: {role:?} {job} {task}: {}", detail.as_str());
                assert_eq!((named.as_str(), index), (job, task));
                assert_eq!(world.members, [(0, 0)]);
            }
            Err(other) => panic!("{cluster}: {role:?} {job} {task}: {other}"),
        }
    }
    let mut world = world_of(dense, false);
    let refusal = world.try_join(0, &mut worker_of(2)).unwrap_err().to_string();
    assert!(refusal.contains("task 2 of job \"worker\"") && refusal.contains("0-1"), "{refusal}");
    let mut hello = worker_of(0).hello(0);
    hello.role = Role::Peer {};
    let refusal = world_of(local, false).handshake(0, hello, false).unwrap_err().to_string();
    assert!(refusal.contains("a peer must be a task of the job local"), "{refusal}");
}

fn worker_of(task: u32) -> Peer {
    super::peers::worker(task)
}

#[test]
fn a_feature_that_the_server_lacks_is_ignored_unless_it_is_required() {
    let mut world = bare();
    let offer = |has, requires| {
        let features = FeatureOffer { has: Features(has), requires: Features(requires) };
        Hello { features, ..worker(1).hello(0) }
    };
    let refusal = world.handshake(0, offer(u64::MAX, 1 << 63 | 1 << 40 | 1), false).unwrap_err();
    assert_eq!(refusal, Refusal::Feature { number: 40, has: Features::ALL });
    assert!(refusal.to_string().contains("requires feature 40"), "{refusal}");
    assert_eq!(world.members, [(0, 0)], "no member has joined");
    assert!(world.handshake(0, offer(u64::MAX, Features::ALL.0), false).is_ok());
    assert!(world.handshake(0, offer(0, 0), false).is_ok(), "a server requires none");
}

#[test]
fn a_hello_that_authenticates_is_refused() {
    let mut world = bare();
    let auth = Some(AuthOffer { token: Text::clipped("trainers"), nonce: [7; 32] }.into());
    let refusal = world.handshake(0, Hello { auth, ..worker(1).hello(0) }, false).unwrap_err();
    let Refusal::Unsupported { kind: 1, detail } = &refusal else { panic!("{refusal}") };
    assert!(detail.as_str().contains("this one has the access token trainers"), "{detail}");
}

#[test]
fn settings_of_another_ps_task_that_may_differ_are_reported_once() {
    let mut world = bare();
    let hello = |checkpoints: &str| {
        let peer = Peer { role: Role::Peer {}, ..worker(1) };
        let identity = identity().with_free("checkpoints", checkpoints).to_wire();
        Hello { identity, ..peer.hello(0) }
    };
    for (checkpoints, reported) in [("none", 0), ("configured", 1), ("configured", 1), ("other", 2)]
    {
        let (line, _) = world.handshake(0, hello(checkpoints), false).unwrap();
        world.disconnect(line);
        assert_eq!(world.events.len(), reported, "{:?}", world.events);
    }
    let text = world.events[0].1.to_string();
    assert!(text.contains("checkpoints is \"none\"") && text.contains("\"configured\""), "{text}");
}

#[test]
fn another_ps_task_with_another_lease_or_last_step_is_refused_by_name() {
    let mut world = bare();
    let peer = Peer { role: Role::Peer {}, ..worker(1) };
    let ours = || identity().with(Identity::LEASE_MS, "5000");
    for (name, here, there) in [("lease_ms", "5000", "800"), ("last_step", "none", "7")] {
        let identity = ours().with(name, there).to_wire();
        let refusal = world.handshake(0, Hello { identity, ..peer.hello(0) }, false).unwrap_err();
        let Refusal::Identity { field, server, client, .. } = &refusal else { panic!("{refusal}") };
        assert_eq!([field, server, client].map(|text| text.as_str()), [name, here, there]);
    }
    let identity = ours().to_wire();
    assert!(world.handshake(0, Hello { identity, ..peer.hello(0) }, false).is_ok());
}

/// A shard that was welcomed before would refuse the epochs that the step owner assigns from then on.
#[test]
fn other_shards_connect_again_when_the_step_owner_learns_of_a_later_time() {
    let mut world = bare();
    let peer = |epoch| {
        let epoch = ClientEpoch(epoch);
        Peer { role: Role::Peer {}, epoch, ..worker(0) }.hello(0)
    };
    let (early, _) = world.handshake(0, peer(0), false).unwrap();
    let reader = world.join(0, &mut Peer { role: Role::Reader {}, ..worker(1) });
    let (late, welcome) = world.handshake(0, peer(1_000_000), false).unwrap();
    assert_eq!(welcome.client_epoch, ClientEpoch(1_000_000));
    assert_eq!(world.closed, [early].into());
    // A shard that connects again learns the same.
    let (_, welcome) = world.handshake(0, peer(0), false).unwrap();
    assert_eq!(welcome.client_epoch, ClientEpoch(1_000_000));
    assert!(!world.closed.contains(&late) && !world.closed.contains(&reader));
}
