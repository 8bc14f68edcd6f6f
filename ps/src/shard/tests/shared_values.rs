//! Shared values: clients read them in place, and lose their pins if they read for too long.

use std::fs::File;
use std::time::Duration;

use pushpull_common::ids::RestoreEpoch;
use pushpull_common::protocol::limits::SHARE_REQUESTS_MAX;
use pushpull_common::protocol::message::{self, Role, ShareValues, SharedValues};
use pushpull_common::protocol::{Message, Refusal};
use pushpull_common::shared_values::{
    AtomicWords, Geometry, PinError, SharedValuesReader, ValueCounts,
};
use pushpull_common::variable::VariableSpec;
use pushpull_optim::optimizer::Sgd;
use pushpull_store::arena::{ArenaStorage, Memory, SharedWords, StateDirectory};

use super::peers::{Peer, Push, bytes_of, chief, f32s, variables, worker};
use super::world::{ConnectionId, LIFE, World};
use crate::config::{Asynchronous, Durability, Network, PsConfig, StalenessPolicy, Storage};
use crate::shard::Shard;
use crate::shard::opening::shard_setup::ServerRun;
use crate::shard::values::applier::WorkOutcome;
use pushpull_common::peer_origin::PeerOrigin;

/// Elements that fill eighty blocks.
pub(super) const LARGE: usize = 80 << 14;

pub(super) const SAME_HOST: PeerOrigin = PeerOrigin::Unix { same_user: true };

/// A world whose only shard has its files at this place.
pub(super) fn at(
    storage: ArenaStorage,
    variables: Vec<VariableSpec>,
    configure: impl Fn(PsConfig) -> PsConfig,
) -> World {
    let mut world = World::bare(variables, Sgd::new(1.0), configure);
    let life = ServerRun { arena: 2, ..LIFE };
    world.shards[0] = Shard::open(world.parts(0), storage, life, world.now).unwrap();
    world
}

/// A world whose shards keep their state in memory that can be shared.
pub(super) fn shareable(
    variables: Vec<VariableSpec>,
    configure: impl Fn(PsConfig) -> PsConfig,
) -> World {
    let mut world = World::bare(variables, Sgd::new(1.0), configure);
    for shard in 0..world.shards.len() {
        let life = ServerRun { arena: 2, ..LIFE };
        let opened = Shard::open(world.parts(shard), ArenaStorage::Shareable, life, world.now);
        world.shards[shard] = opened.unwrap();
    }
    world
}

/// A world in memory that can be shared, whose variables have values. Returns the connections of
/// its chief and of a worker.
pub(super) fn same_host(
    variables: Vec<VariableSpec>,
    configure: impl Fn(PsConfig) -> PsConfig,
) -> (World, ConnectionId, ConnectionId) {
    let mut world = at(ArenaStorage::Shareable, variables, configure);
    let chief = world.begin()[0];
    let line = world.join(0, &mut worker(1));
    (world, chief, line)
}

pub(super) fn large(pin_bytes: u64) -> (World, ConnectionId, ConnectionId) {
    let w = VariableSpec::f32("w", [LARGE as u64]).unwrap();
    same_host(vec![w], |config| config.storage(Storage::memory().pin_bytes_max(pin_bytes)))
}

fn share() -> Message {
    ShareValues { wants: 1 }.into()
}

/// A client that shares the values of a world's only shard.
struct SharingClient {
    reader: SharedValuesReader<SharedWords>,
    shared: SharedValues,
    blocks: Vec<u32>,
}

impl SharingClient {
    fn new(world: &mut World, line: ConnectionId) -> SharingClient {
        let Message::SharedValues(shared) = world.ask(line, share()) else {
            panic!("nothing is shared")
        };
        let files = world.shared.remove(&line).expect("descriptors").into_iter().map(File::from);
        let files: Vec<File> = files.collect();
        let [block_table, reader_slot, values] = &files[..] else {
            panic!("{} descriptors", files.len())
        };
        for (file, bytes) in files.iter().zip([
            shared.block_table_bytes,
            shared.reader_slot_bytes,
            shared.values_bytes,
        ]) {
            assert_eq!(file.metadata().unwrap().len(), bytes);
        }
        for file in [block_table, values] {
            assert!(
                Memory::of_file(file.try_clone().unwrap()).is_err(),
                "the client cannot map it for writes"
            );
        }
        let SharedValues { offset, block_bytes, stride, blocks, logical_blocks, .. } = shared;
        let geometry = Geometry { offset, block_bytes, stride, blocks, logical_blocks };
        geometry.check(shared.values_bytes).unwrap();
        let read = |file| SharedWords::of(Memory::view_of(file).unwrap());
        let reader_slot =
            SharedWords::of(Memory::of_file(reader_slot.try_clone().unwrap()).unwrap());
        let reader = SharedValuesReader::new(
            read(block_table),
            reader_slot,
            read(values),
            geometry,
            shared.owner_generation,
        );
        SharingClient { reader, shared, blocks: Vec::new() }
    }

    fn pin(&mut self) -> Result<ValueCounts, PinError> {
        self.reader.pin(0..self.shared.logical_blocks, &mut self.blocks)
    }

    /// Copies this many bytes of the values out of the pinned blocks.
    fn copy(&self, bytes: u64) -> Vec<u8> {
        let geometry = self.reader.geometry();
        let pieces = geometry.pieces(0..bytes).flat_map(|(logical, within)| {
            let start = geometry.start(self.blocks[logical as usize]);
            (start + within.start) / 8..(start + within.end) / 8
        });
        pieces.flat_map(|word| self.reader.values().load(word as usize).to_le_bytes()).collect()
    }

    fn pull(&mut self, bytes: u64) -> (ValueCounts, Vec<u8>) {
        let counts = self.pin().unwrap();
        let values = self.copy(bytes);
        self.reader.unpin(bytes).unwrap();
        (counts, values)
    }
}

fn push_large(world: &mut World, line: ConnectionId, sequence: u64) -> WorkOutcome {
    let body = bytes_of(&vec![1_f32; LARGE]);
    let push = Push::gradient(sequence, world.token(line), world.push_slot(line));
    let parts: Vec<(u64, &[u8])> = (0_u64..).step_by(1 << 20).zip(body.chunks(1 << 20)).collect();
    world.push(line, &push, &parts);
    world.work()
}

fn push_small(world: &mut World, line: ConnectionId, sequence: u64) {
    let push = Push::gradient(sequence, world.token(line), world.push_slot(line));
    world.push_answer(line, &push, &[(0, &bytes_of(&[1_f32, 2.0, 3.0]))]);
}

pub(super) fn all_are(bytes: &[u8], value: f32) {
    assert_eq!(bytes.len(), 4 * LARGE);
    assert!(f32s(bytes).iter().all(|&found| found == value), "all are {value}");
}

#[test]
fn shared_values_equal_the_answer_to_a_pull() {
    let (mut world, _, line) = same_host(variables(), |config| config);
    let mut reader = worker(2);
    reader.role = Role::Reader {};
    let reader = world.join(0, &mut reader);
    let mut clients =
        [SharingClient::new(&mut world, line), SharingClient::new(&mut world, reader)];
    let mut blocks = Vec::new();
    for version in 0..4 {
        for client in &mut clients {
            let (counts, values) = client.pull(56);
            assert_eq!(values, world.values(line));
            let expected = ValueCounts {
                version,
                gradients: version,
                step: version,
                serves: version,
                epoch: 1,
            };
            assert_eq!(counts, expected);
        }
        blocks.push(clients[0].blocks.clone());
        push_small(&mut world, line, version + 1);
    }
    assert!(blocks.iter().all(|other| *other == blocks[0]), "few bytes are changed in place");
    world.tick();
    let metrics = world.metrics();
    assert_eq!((metrics.direct_pulls, metrics.direct_pull_bytes), (8, 8 * 56));
    let (pulls, _) = (clients[0].pull(56), world.disconnect(line));
    assert_eq!((pulls.0.version, world.metrics().direct_pulls), (4, 9));
}

#[test]
fn pinned_blocks_are_not_changed_in_place() {
    let (mut world, _, line) = same_host(variables(), |config| config);
    let mut client = SharingClient::new(&mut world, line);
    client.pin().unwrap();
    let blocks = client.blocks.clone();
    push_small(&mut world, line, 1);
    assert_eq!(f32s(&client.copy(16)), [0.0; 4]);
    client.reader.unpin(16).unwrap();
    let (_, values) = client.pull(16);
    assert_eq!(f32s(&values), [-1.0, -2.0, -3.0, 0.0]);
    assert_ne!(client.blocks, blocks);
}

#[test]
fn a_slow_reader_pins_only_what_it_reads() {
    let (mut world, _, line) = large(80 << 16);
    let mut client = SharingClient::new(&mut world, line);
    client.pin().unwrap();
    for sequence in 1..9 {
        assert_eq!(push_large(&mut world, line, sequence), WorkOutcome::Idle);
    }
    all_are(&client.copy(4 * LARGE as u64), 0.0);
    client.reader.unpin(0).unwrap();
    let (counts, values) = client.pull(4 * LARGE as u64);
    assert_eq!(counts.version, 8);
    all_are(&values, -8.0);
}

#[test]
fn an_update_waits_until_a_reader_unpins_or_is_revoked() {
    // A push needs as many blocks as it changes, 80, and 20 more may be pinned.
    let (mut world, _, line) = large(20 << 16);
    let mut client = SharingClient::new(&mut world, line);
    client.pin().unwrap();
    assert_eq!(push_large(&mut world, line, 1), WorkOutcome::Idle);
    assert_eq!(push_large(&mut world, line, 2), WorkOutcome::Blocked);
    assert!(world.shards[0].is_shared(), "the reader slots are to be checked again");
    all_are(&client.copy(4 * LARGE as u64), 0.0);
    client.reader.unpin(0).unwrap();
    assert_eq!(world.work(), WorkOutcome::Idle);

    let mut other = SharingClient::new(&mut world, line);
    other.pin().unwrap();
    assert!(client.pin().is_ok());
    assert_eq!(client.reader.unpin(0), Err(PinError::Closed), "a connection has one reader slot");
    assert_eq!(other.reader.unpin(0), Ok(()));
}

#[test]
fn a_reader_that_takes_too_long_learns_that_its_pin_is_revoked() {
    let (mut world, chief, line) = large(20 << 16);
    let mut slow = SharingClient::new(&mut world, line);
    let mut quick = SharingClient::new(&mut world, chief);
    slow.pin().unwrap();
    assert_eq!(push_large(&mut world, line, 1), WorkOutcome::Idle);
    quick.pin().unwrap();
    assert_eq!(push_large(&mut world, line, 2), WorkOutcome::Blocked);
    let away = world.shards[0].revoke_slow_readers();
    assert_eq!(away, [line.connection], "the other reader blocks nothing");
    assert_eq!(world.work(), WorkOutcome::Idle);
    assert_eq!(slow.reader.unpin(0), Err(PinError::Closed));
    all_are(&quick.copy(4 * LARGE as u64), -1.0);
    assert_eq!(quick.reader.unpin(0), Ok(()));
    assert_eq!(quick.pull(4 * LARGE as u64).0.version, 2);
    assert!(world.shards[0].revoke_slow_readers().is_empty());
}

#[test]
fn a_stalled_reader_is_cut_off_although_no_update_waits() {
    let (mut world, chief, line) = large(20 << 16);
    let mut stopped = SharingClient::new(&mut world, line);
    let mut busy = SharingClient::new(&mut world, chief);
    let stall_timeout = Duration::from_secs(30);
    stopped.pin().unwrap();
    let start = world.now;
    for second in 0..30 {
        // A busy reader may have the same pin at every check.
        busy.pull(56);
        busy.pin().unwrap();
        let now = start + Duration::from_secs(second);
        assert_eq!(world.shards[0].revoke_stalled_readers(now, stall_timeout), [0; 0]);
        busy.reader.unpin(56).unwrap();
    }
    let now = start + stall_timeout;
    let cut = world.shards[0].revoke_stalled_readers(now, stall_timeout);
    assert_eq!(cut, [line.connection]);
    assert_eq!(stopped.reader.unpin(0), Err(PinError::Closed));
    assert!(world.shards[0].revoke_stalled_readers(now, stall_timeout).is_empty());
}

#[test]
fn blocks_kept_for_readers_of_one_block_table_are_not_kept_for_those_of_the_next() {
    let (mut world, _, line) = large(20 << 16);
    let mut first = SharingClient::new(&mut world, line);
    // The sequence advances to a number that the next block table reaches soon.
    first.pin().unwrap();
    assert_eq!(push_large(&mut world, line, 1), WorkOutcome::Idle);
    world.disconnect(line);
    let line = world.join(0, &mut worker(3));
    let mut next = SharingClient::new(&mut world, line);
    next.pin().unwrap();
    assert!(world.shards[0].revoke_slow_readers().is_empty());
}

#[test]
fn the_share_requests_of_a_connection_are_limited() {
    let (mut world, _, line) = same_host(variables(), |config| config);
    for _ in 0..SHARE_REQUESTS_MAX {
        assert_eq!(world.refused_or_shared(line), None);
    }
    let refused = world.refused_or_shared(line);
    assert!(matches!(refused, Some(Refusal::Unsupported { .. })), "{refused:?}");
    let line = world.join(0, &mut worker(3));
    assert_eq!(world.refused_or_shared(line), None);
}

#[test]
fn no_content_of_a_reader_slot_harms_the_shard() {
    let (mut world, _, line) = same_host(variables(), |config| config);
    SharingClient::new(&mut world, line);
    let Message::SharedValues(_) = world.ask(line, share()) else { panic!("nothing is shared") };
    let files = world.shared.remove(&line).unwrap();
    let mut reader_slot = Memory::of_file(File::from(files.into_iter().nth(1).unwrap())).unwrap();
    for (round, word) in (1..).zip([u64::MAX, 1, 2, 3, 1 << 63]) {
        reader_slot.bytes_mut().fill(0xff);
        reader_slot.store(0, word);
        push_small(&mut world, line, round);
        world.tick();
    }
    assert_eq!(f32s(&world.values(line))[..3], [-5.0, -10.0, -15.0]);
}

#[test]
fn values_that_are_no_longer_shared_cannot_be_read() {
    let (mut world, chief, line) = same_host(variables(), |config| config);
    let mut gone = SharingClient::new(&mut world, line);
    let mut stays = SharingClient::new(&mut world, chief);
    gone.pin().unwrap();
    world.disconnect(line);
    assert_eq!(gone.reader.unpin(0), Err(PinError::Closed));
    assert!(stays.pin().is_ok() && stays.reader.unpin(0).is_ok());
    world.disconnect(chief);
    assert_eq!(stays.pin().unwrap_err(), PinError::Closed);
    assert!(!world.shards[0].is_shared());
    // A client that comes later shares the same values.
    let line = world.join(0, &mut worker(3));
    assert_eq!(SharingClient::new(&mut world, line).pull(56).1, world.values(line));
}

#[test]
fn values_taken_over_by_another_process_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let state = StateDirectory::open(folder.path()).unwrap();
    let storage = || ArenaStorage::Folder(state.shard(0).unwrap());
    let mut world = at(storage(), variables(), |config| config);
    let line = world.begin()[0];
    let mut client = SharingClient::new(&mut world, line);
    assert_eq!((client.shared.owner_generation, client.pin().is_ok()), (0, true));
    // The block table of a killed process stays as it is.
    let parts = world.parts(0);
    let life = ServerRun { arena: 2, ..LIFE };
    let next = Shard::open(parts, storage(), life, world.now).unwrap();
    std::mem::forget(std::mem::replace(&mut world.shards[0], next));
    assert_eq!(client.reader.unpin(0), Err(PinError::Closed));
    let line = world.join(0, &mut chief());
    let mut client = SharingClient::new(&mut world, line);
    assert_eq!((client.shared.owner_generation, client.pull(56).0.version), (1, 0));
}

#[test]
fn a_client_that_is_refused_shared_values_learns_why_and_continues() {
    let refused = |world: &mut World, origin: PeerOrigin, wants: u64, role: Role| {
        let peer = Peer { role, ..worker(5) };
        let (line, _) = world.handshake_over(origin, 0, peer.hello(0)).unwrap();
        let refusal = world.refused(line, ShareValues { wants }.into());
        assert!(world.shared.is_empty());
        let alive = world.ask(line, message::Heartbeat {}.into());
        assert!(matches!(alive, Message::HeartbeatAnswer(_)));
        world.disconnect(line);
        match refusal {
            Refusal::Unsupported { kind: 6, detail } => detail.as_str().to_owned(),
            other => format!("{other:?}"),
        }
    };
    let member = Role::Worker {};
    let (mut world, ..) = same_host(variables(), |config| config);
    let over_tcp = "memory is shared over Unix sockets only";
    assert_eq!(refused(&mut world, PeerOrigin::Remote, 1, member), over_tcp);
    assert_eq!(refused(&mut world, PeerOrigin::Loopback, 1, member), over_tcp);
    let other_user = PeerOrigin::Unix { same_user: false };
    assert_eq!(refused(&mut world, other_user, 1, member), "Denied");
    assert_eq!(refused(&mut world, SAME_HOST, 2, member), "none of the requested memory is shared");
    assert!(refused(&mut world, SAME_HOST, 1, Role::Peer {}).starts_with("Role"));

    let mut bare = at(ArenaStorage::Shareable, variables(), |config| config);
    assert_eq!(refused(&mut bare, SAME_HOST, 1, member), "NotInitialized");

    let (mut world, ..) =
        same_host(variables(), |config| config.network(Network::default().shared_memory(false)));
    assert_eq!(refused(&mut world, SAME_HOST, 1, member), "shared memory is switched off");
    let compensates = StalenessPolicy::DelayCompensation { lambda: 0.04 };
    let (mut world, ..) = same_host(variables(), |config| {
        config.mode(Asynchronous::default().staleness(compensates))
    });
    assert!(refused(&mut world, SAME_HOST, 1, member).contains("compensate"));
    let (mut world, _) = World::ready(variables(), Sgd::new(1.0), |config| {
        config.storage(Storage::memory().durability(Durability::Power))
    });
    assert!(refused(&mut world, SAME_HOST, 1, member).contains("disk"));
    // Anonymous memory has no descriptor.
    let mut world = at(ArenaStorage::Anonymous, variables(), |config| config);
    world.begin();
    assert!(refused(&mut world, SAME_HOST, 1, member).contains("share"));
}

#[test]
fn shared_values_count_as_memory() {
    let memory = |bytes_max| {
        let (mut world, _, line) =
            same_host(variables(), |config| config.storage(Storage::memory().bytes_max(bytes_max)));
        let used = bytes_max - world.bytes_left();
        (world.refused_or_shared(line), used)
    };
    let (shared, used) = memory(1 << 30);
    assert_eq!(shared, None);
    let (refused, _) = memory(used + 1000);
    assert!(matches!(refused, Some(Refusal::DoesNotFit { .. })), "{refused:?}");
}

impl World {
    fn refused_or_shared(&mut self, line: ConnectionId) -> Option<Refusal> {
        match self.ask(line, share()) {
            Message::Refused(refused) => Some(refused.refusal),
            other => {
                assert!(matches!(other, Message::SharedValues(_)), "{other:?}");
                None
            }
        }
    }
}

#[test]
fn values_of_forgotten_variables_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let state = StateDirectory::open(folder.path()).unwrap();
    let mut world = at(ArenaStorage::Folder(state.shard(0).unwrap()), variables(), |config| config);
    let line = world.begin()[0];
    let mut client = SharingClient::new(&mut world, line);
    assert_eq!(client.pull(56).0.epoch, u64::from(RestoreEpoch(1).0));
    world.shards[0].forget_variables().unwrap();
    assert_eq!(client.pin().unwrap_err(), PinError::Closed);
}
