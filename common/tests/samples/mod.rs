//! A sample of every message and of every variant in it, named as in the golden table.

mod variants;

use pushpull_common::codec::Encodings;
use pushpull_common::data_set::SampleRange;
use pushpull_common::ids::{
    ClientEpoch, CoordinatorEpoch, CoordinatorId, EffectNumber, GlobalStep, Incarnation,
    PartitionId, RequestId, RestoreEpoch, Sequence, ShardId, TokenId,
};
use pushpull_common::protocol::message::*;
use pushpull_common::protocol::wire::{List, Text};
use pushpull_common::protocol::{
    BodyStamp, EffectId, EffectRef, Envelope, Features, Grant, Message, encode_for,
};

use variants::{Variants as _, filled};

/// A message, its name in the table, and the length and checksum of a body for its header.
pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) message: Message,
    pub(crate) body: BodyStamp,
    /// The features that are agreed between its sender and its receiver.
    pub(crate) features: Features,
}

impl Sample {
    /// A message without a body, between sides that have agreed on no feature.
    fn plain(name: &str, message: Message) -> Sample {
        let name = name.to_owned();
        let body = BodyStamp::NONE;
        Sample { name, message, body, features: Features::NONE }
    }

    /// Encodes header and meta with [`ENVELOPE`].
    pub(crate) fn frame(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode_for(self.features, &mut bytes, &ENVELOPE, &self.message, self.body);
        bytes
    }
}

/// The envelope of every sample. No two fields are equal, so that a swap changes the bytes.
pub(crate) const ENVELOPE: Envelope = Envelope {
    request: RequestId(0x0101),
    restore_epoch: RestoreEpoch(0x0202),
    step: GlobalStep(0x0303),
    sequence: Sequence(0x0404),
    deadline_ms: 0x0505,
};

/// Returns every message, and every variant of every sum type within a message.
pub(crate) fn samples() -> Vec<Sample> {
    variants::check_complete();
    let mut list = Vec::new();
    let mut add = |name: &str, message: Message| {
        list.push(Sample::plain(name, message));
    };
    conversation(&mut add);
    variables(&mut add);
    tokens(&mut add);
    pushes(&mut add);
    coordinators(&mut add);
    between_servers(&mut add);
    services(&mut add);
    rings(&mut add);
    clusters(&mut add);
    administration(&mut add);
    with_bodies(&mut list);
    list
}

fn conversation(add: &mut impl FnMut(&str, Message)) {
    for (name, role) in Role::named() {
        add(&format!("Hello {name}"), Hello { role, ..hello() }.into());
    }
    for (name, body_crc) in BodyCrc::named() {
        add(&format!("Hello body_crc {name}"), Hello { body_crc, ..hello() }.into());
    }
    let catalogue = Some(filled(0xa0));
    add("Hello again", Hello { catalogue, client_epoch: ClientEpoch(9), ..hello() }.into());
    let auth = Some(AuthOffer { token: text("trainers-1"), nonce: filled(0xb0) }.into());
    add("Hello auth", Hello { identity: List::default(), auth, ..hello() }.into());
    let proof = filled(0xd0);
    add("Challenge", Challenge { nonce: filled(0xc0), proof }.into());
    add("ChallengeAnswer", ChallengeAnswer { proof }.into());
    for (name, mode) in ModeIs::named() {
        add(&format!("Welcome {name}"), Welcome { mode, ..welcome() }.into());
    }
    for (name, non_finite) in NonFinitePolicy::named() {
        add(&format!("Welcome non_finite {name}"), Welcome { non_finite, ..welcome() }.into());
    }
    for (name, catalogue) in CatalogueState::named() {
        add(&format!("Welcome catalogue {name}"), Welcome { catalogue, ..welcome() }.into());
    }
    add("Welcome unix_address", Welcome { unix_address: text("unix:/run/ps"), ..welcome() }.into());
    for (name, refusal) in variants::refusals() {
        add(&format!("Refused {name}"), Refused { refusal }.into());
    }
    add("Heartbeat", Heartbeat {}.into());
    add("HeartbeatAnswer", HeartbeatAnswer {}.into());
    add("ShareValues", ShareValues { wants: 1 }.into());
    add("SharedValues", shared().into());
    add("SharePushBuffer", SharePushBuffer {}.into());
    add("SharedPushBuffer", shared_push_buffer().into());
    add("Finish", Finish {}.into());
    add("Finished", Finished {}.into());
    add("AwaitEnd", AwaitEnd {}.into());
    add("Leave", Leave {}.into());
    add("Left", Left {}.into());
}

fn hello() -> Hello {
    let field = |name, value| (text(name), text(value));
    let identity = vec![field("optimizer", "adam"), field("shards", "2")];
    Hello {
        version_oldest: 1,
        version_newest: 2,
        role: Role::Worker {},
        job: text("worker"),
        task: 3,
        shard: ShardId { task: 1, shard: 2 },
        incarnation: Incarnation(0x1122_3344_5566_7788),
        client_epoch: ClientEpoch(0),
        seen_epoch: RestoreEpoch(4),
        seen_arena: 0x0809_0a0b_0c0d_0e0f,
        seen_step: GlobalStep(5),
        catalogue: None,
        body_crc: BodyCrc::Auto {},
        identity: List::new(identity).expect("the list is within its limit"),
        auth: None,
        features: FeatureOffer { has: Features(0x3), requires: Features(0x2) },
    }
}

fn welcome() -> Welcome {
    Welcome {
        version: 1,
        shards: 2,
        client_epoch: ClientEpoch(6),
        mode: ModeIs::Asynchronous { owner_first: false },
        lease_ms: 5000,
        part_bytes_max: 1 << 20,
        body_crc: BodyCrc::Off {},
        non_finite: NonFinitePolicy::Reject {},
        encodings: Encodings(0x3e),
        catalogue: CatalogueState::Absent {},
        restore_epoch: RestoreEpoch(4),
        restored_step: GlobalStep(17),
        arena: 0x1817_1615_1413_1211,
        unix_address: Text::default(),
        identity: List::default(),
        features: Features(0x8000_0000_0000_0001),
    }
}

fn shared() -> SharedValues {
    SharedValues {
        shares: 1,
        owner_generation: 2,
        block_table_bytes: 0x1003,
        reader_slot_bytes: 0x1004,
        values_bytes: 0x1005,
        offset: 0x1006,
        block_bytes: 0x1007,
        stride: 0x1008,
        blocks: 9,
        logical_blocks: 10,
    }
}

fn shared_push_buffer() -> SharedPushBuffer {
    let push_slots = List::new(vec![21, 22]).expect("the list is within its limit");
    SharedPushBuffer { bytes: 0x1009, first: 0x100a, stride: 0x100b, push_slots }
}

fn variables(add: &mut impl FnMut(&str, Message)) {
    add("Declare", Declare { digest: filled(0xd0) }.into());
    for (name, state) in CatalogueState::named() {
        let restore_epoch = RestoreEpoch(4);
        add(&format!("Declared {name}"), Declared { state, restore_epoch, trained: true }.into());
    }
    add("Initialize", Initialize { epoch: RestoreEpoch(5) }.into());
    add("FindCheckpoint", FindCheckpoint {}.into());
    for (name, checkpoint) in [("none", None), ("one", Some(checkpoint()))] {
        let found = CheckpointFound { checkpoint, named: RestoreEpoch(5) };
        add(&format!("CheckpointFound {name}"), found.into());
    }
    add("PassedOverQuery", PassedOverQuery {}.into());
    let damaged = PassedOver { name: text("ckpt-4-18"), cause: text("cannot trust it") };
    for (name, checkpoints) in [("none", vec![]), ("one", vec![damaged])] {
        let checkpoints = List::new(checkpoints).expect("the list is within its limit");
        add(&format!("PassedOverAre {name}"), PassedOverAre { checkpoints }.into());
    }
    let epoch = RestoreEpoch(5);
    add("PrepareRestore", PrepareRestore { checkpoint: checkpoint(), epoch }.into());
    add("RestorePrepared", RestorePrepared {}.into());
    add("Restore", Restore { checkpoint: checkpoint(), epoch: RestoreEpoch(5) }.into());
    add("Save", Save {}.into());
    add("Saved", Saved { checkpoint: checkpoint() }.into());
    add("SaveShard", SaveShard { name: text("ckpt-4-17") }.into());
    add("ShardSaved", ShardSaved {}.into());
    add("AwaitReady", AwaitReady {}.into());
    add("Ready", Ready { digest: filled(0xd0) }.into());
    add("FetchCatalogue", FetchCatalogue {}.into());
    add("CatalogueIs", CatalogueIs { digest: filled(0xd0) }.into());
    for (name, selection) in Selection::named() {
        add(&format!("Pull {name}"), Pull { selection }.into());
    }
    add("Pulled", Pulled { version: 7, gradients: 5, offset: 4096, last: false }.into());
    let pull = Pull { selection: Selection::All {} };
    add("PullEncoded", PullEncoded { pull, encoding: 2 }.into());
    add("PulledEncoded", pulled_encoded().into());
    add("Pulled last", Pulled { version: 7, gradients: 5, offset: 8192, last: true }.into());
    add("PullRows", PullRows { partition: PartitionId(17) }.into());
    let pull = PullRows { partition: PartitionId(17) };
    add("PullRowsEncoded", PullRowsEncoded { pull, encoding: 1 }.into());
    add("Rows", Rows { version: 7, gradients: 5 }.into());
}

fn pulled_encoded() -> PulledEncoded {
    let part = Pulled { version: 7, gradients: 5, offset: 4096, last: true };
    PulledEncoded { part, bytes: 8192 }
}

fn checkpoint() -> CheckpointId {
    CheckpointId { name: text("ckpt-4-17"), epoch: RestoreEpoch(4), step: GlobalStep(17) }
}

fn tokens(add: &mut impl FnMut(&str, Message)) {
    add("TokenRequest", TokenRequest { newest: TokenId(10) }.into());
    add("Granted", Granted { grant: grant() }.into());
    let samples = Some(SampleRange { epoch: 1, start: 256, len: 128 });
    add("Granted samples", Granted { grant: Grant { samples, ..grant() } }.into());
    for (name, reason) in EndReason::named() {
        add(&format!("Ended {name}"), Ended { reason }.into());
    }
    add("ReturnToken", ReturnToken { token: TokenId(11), generation: 12 }.into());
    add("Returned", Returned {}.into());
    add("Goodbye", Goodbye {}.into());
    add("SkipBatch", SkipBatch { token: TokenId(11), generation: 12 }.into());
    let seed = Some(7);
    let epochs = Some(3);
    add("DeclareData", DeclareData { seed, epochs, ..declare_data() }.into());
    add("DeclareData endless", declare_data().into());
    add("DataDeclared", DataDeclared { begun: 21, unspent: 22 }.into());
    add("Reserve", Reserve {}.into());
    add("Reserved", Reserved { push_slot: 14 }.into());
}

fn declare_data() -> DeclareData {
    let seed = None;
    let epochs = None;
    let drop_remainder = true;
    DeclareData { name: text("train"), samples: 60_000, batch: 128, seed, epochs, drop_remainder }
}

fn grant() -> Grant {
    Grant {
        token: TokenId(11),
        generation: 12,
        step: GlobalStep(13),
        push_slot: 14,
        samples: None,
        ahead: None,
    }
}

fn pushes(add: &mut impl FnMut(&str, Message)) {
    for (name, operation) in Operation::named() {
        add(&format!("PushPart {name}"), PushPart { operation, ..part() }.into());
    }
    add("PushPart last", PushPart { whole: Some(8192), next: true, ..part() }.into());
    add("PushPart read", PushPart { read: Some(5), ..part() }.into());
    add("PushEncoded", encoded().into());
    add("PushShared", push_shared().into());
    let ranges = List::default();
    add(
        "PushShared last",
        PushShared { whole: Some(8192), next: true, ranges, ..push_shared() }.into(),
    );
    for (name, outcome) in variants::outcomes() {
        add(&format!("PushAnswer {name}"), PushAnswer { outcome, ..answer() }.into());
    }
    add("PushAnswer next", PushAnswer { next: Some(grant()), push_slot: 15, ..answer() }.into());
    for (name, reason) in EndReason::named() {
        let ended = Some(reason);
        add(&format!("PushAnswer ended {name}"), PushAnswer { ended, ..answer() }.into());
    }
    add("PushAnswer again", PushAnswer { duplicate: true, ..answer() }.into());
    add("Withdraw", Withdraw {}.into());
    add("OutcomeQuery", OutcomeQuery {}.into());
    for (name, state) in variants::push_states() {
        add(&format!("OutcomeIs {name}"), OutcomeIs { state }.into());
    }
}

fn part() -> PushPart {
    PushPart {
        operation: Operation::Gradient {},
        token: TokenId(11),
        generation: 12,
        push_slot: 14,
        offset: 4096,
        whole: None,
        next: false,
        read: None,
    }
}

fn effect() -> EffectRef {
    let id = EffectId {
        coordinator: CoordinatorId(31),
        epoch: CoordinatorEpoch(32),
        number: EffectNumber(40),
    };
    EffectRef { id, settled: EffectNumber(34), digest: 0x0102_0304_0506_0708 }
}

fn coordinators(add: &mut impl FnMut(&str, Message)) {
    let name = text("trainer");
    let coordinator = CoordinatorId(31);
    let epoch = CoordinatorEpoch(32);
    add("OpenCoordinator", OpenCoordinator { name, coordinator, epoch }.into());
    let settled = EffectNumber(34);
    let window = 0b1010;
    let first_digest = 0x1112_1314;
    let digest_of = EffectNumber(33);
    let digest = 0x2122_2324;
    let coordinator_is =
        CoordinatorIs { coordinator, epoch, settled, window, first_digest, digest_of, digest };
    add("CoordinatorIs", coordinator_is.into());
    add("CoordinatorQuery", CoordinatorQuery { name: text("trainer") }.into());
    add("CloseCoordinator", CloseCoordinator { name: text("trainer"), epoch }.into());
    add("CoordinatorClosed", CoordinatorClosed {}.into());
    add("EffectPart", EffectPart { part: part(), effect: effect() }.into());
    add("EffectEncoded", EffectEncoded { encoded: encoded(), effect: effect() }.into());
    add("EffectShared", EffectShared { shared: Box::new(push_shared()), effect: effect() }.into());
}

fn encoded() -> PushEncoded {
    PushEncoded { part: part(), encoding: 3, elements: 1000, factor: 0.25 }
}

fn push_shared() -> PushShared {
    let PushPart { operation, token, generation, push_slot, whole, next, .. } = part();
    let ranges = [SharedRange { start: 0, end: 4096 }, SharedRange { start: 8192, end: 8200 }];
    let ranges = List::new(ranges.to_vec()).expect("the list is within its limit");
    PushShared { operation, token, generation, push_slot, whole, next, read: Some(5), ranges }
}

fn answer() -> PushAnswer {
    let outcome = variants::outcomes().swap_remove(0).1;
    PushAnswer { outcome, duplicate: false, next: None, ended: None, push_slot: 0 }
}

fn between_servers(add: &mut impl FnMut(&str, Message)) {
    let token = TokenId(11);
    let shard = ShardId { task: 1, shard: 2 };
    let client = ClientEpoch(3);
    add("Held", Held { token, client, shard, squares: 0.25 }.into());
    add("StepApplied", StepApplied { shard }.into());
    let pushes = [(token, 1.0), (TokenId(9), 0.5), (TokenId(0x0102_0304_0506_0708), 0.25)];
    let pushes = List::new(pushes.to_vec()).expect("the list is within its limit");
    add("Commit", Commit { pushes }.into());
    add("TokenOver", TokenOver { token }.into());
    add("KeepCut", KeepCut {}.into());
    add("Recall", Recall { token, client }.into());
    add("Recalled", Recalled { token, shard, applied: true }.into());
    add("ChiefIs", ChiefIs { client }.into());
    add("AuditPushes", AuditPushes { client, ends: true }.into());
    let applied = List::new(vec![(Sequence(3), token)]).expect("the list is within its limit");
    let oldest = Sequence(1);
    add("PushesAudited", PushesAudited { client, shard, ended: true, oldest, applied }.into());
}

fn services(add: &mut impl FnMut(&str, Message)) {
    add("ServerIs", server_is().into());
    add("ServerIs known", ServerIs { known: true, ..server_is() }.into());
    add("Describe", Describe {}.into());
    add("Described", Described { bytes: 4090 }.into());
    add("Call", function_call().into());
    add("Call scheduled", Call { scheduled: Some(effect()), ..function_call() }.into());
    for (name, input) in Input::named() {
        let inputs = List::of([NamedInput { name: text("x"), input }]);
        let inputs = inputs.expect("the list is within its limit");
        add(&format!("Call {name}"), Call { inputs, retain: true, ..function_call() }.into());
    }
    add("InputPart", InputPart { call: 31, offset: 1 << 20 }.into());
    for (name, outcome) in CallOutcome::named() {
        add(&format!("CallEnded {name}"), CallEnded { outcome }.into());
    }
    add("OutputPart", OutputPart { offset: 1 << 20 }.into());
    add("CancelCall", CancelCall { call: 31 }.into());
    let of = variants::output_ref();
    add("FetchOutput", FetchOutput { of, principal: text("") }.into());
    let of = variants::output_ref();
    add("FetchOutput for another", FetchOutput { of, principal: text("caller-1") }.into());
    add("Fetched", Fetched { is: value_is() }.into());
    let calls = List::new(vec![31, 33]).expect("the list is within its limit");
    add("Release", Release { calls }.into());
    add("Released", Released {}.into());
}

fn server_is() -> ServerIs {
    ServerIs {
        version: 1,
        job: text("worker"),
        task: 3,
        incarnation: Incarnation(0x1122_3344_5566_7788),
        known: false,
        lease_ms: 10_000,
        calls_max: 64,
        bytes_max: 1 << 30,
        body_crc: BodyCrc::Off {},
        features: Features(0x3),
    }
}

fn value_is() -> ValueIs {
    let extents = List::new(vec![128, 64]).expect("the list is within its limit");
    ValueIs { elements: 1, extents }
}

fn function_call() -> Call {
    Call {
        call: 31,
        settled: 28,
        ended: List::new(vec![30]).expect("the list is within its limit"),
        depth: 2,
        function: text("tower"),
        device: text("/job:worker/task:3/device:CPU:0"),
        any_device: true,
        retain: false,
        scheduled: None,
        inputs: List::default(),
    }
}

fn rings(add: &mut impl FnMut(&str, Message)) {
    add("RingJoin", ring_join().into());
    let index = Some(3);
    let gone = List::new(vec![1, 2]).expect("the list is within its limit");
    add("RingJoin again", RingJoin { index, epoch: 7, gone, ..ring_join() }.into());
    let missing = List::new(vec![2, 5]).expect("the list is within its limit");
    add("RingWaits", RingWaits { came: 4, size: 6, missing }.into());
    let RingJoin { host, addresses, .. } = ring_join();
    let process = Incarnation(0x5566_7788_99aa_bbcc);
    add("RingMember", RingMember { rank: 2, index: 3, process, host, addresses }.into());
    let rendezvous = 0x1122_3344_5566_7788;
    let serving = None;
    let formed = RingFormed { rendezvous, epoch: 8, rank: 2, size: 6, lease_ms: 5000, serving };
    add("RingFormed", formed.clone().into());
    add("RingFormed serving", RingFormed { serving: Some(3), ..formed }.into());
    add("RingJoiners", RingJoiners { count: 2 }.into());
    for (name, end) in RingEnd::named() {
        add(&format!("RingOver {name}"), RingOver { epoch: 8, end }.into());
    }
    add("RingLink", RingLink { rendezvous, epoch: 8, rank: 2, to: process }.into());
    add("RingLinked", RingLinked { memory: 2 << 20 }.into());
    for (name, collective) in Collective::named() {
        add(&format!("RingOperation {name}"), variants::ring_operation(collective).into());
    }
    for (name, codec) in RingCodec::named() {
        let reduce = variants::ring_operation(Collective::ReduceMean {});
        let encoded = RingOperation { codec: Some(codec), ..reduce };
        add(&format!("RingOperation as {name}"), encoded.into());
    }
    add("RingPart", ring_part().into());
    add("RingEntered", RingEntered { epoch: 8 }.into());
    add("RingMoved", RingMoved { addresses: ring_join().addresses }.into());
}

fn ring_join() -> RingJoin {
    let addresses = vec![text("unix:/run/ring-3"), text("node-3:29500")];
    RingJoin {
        id: text("worker-3"),
        index: None,
        size: 6,
        host: text("node-3"),
        addresses: List::new(addresses).expect("the list is within its limit"),
        epoch: 0,
        gone: List::default(),
    }
}

fn clusters(add: &mut impl FnMut(&str, Message)) {
    for (name, key) in TaskKey::named() {
        let task = RegisterTask { job: text("worker"), key, address: text("node-3:2222") };
        add(&format!("RegisterTask by {name}"), task.into());
    }
    let missing = text("worker 2");
    add("ClusterWaits", ClusterWaits { registered: 4, tasks: 5, missing }.into());
}

fn administration(add: &mut impl FnMut(&str, Message)) {
    add("StatusQuery", StatusQuery { members_from: 100 }.into());
    for (name, phase) in PhaseIs::named() {
        add(&format!("StatusIs {name}"), StatusIs { phase, ..status() }.into());
    }
    let members = PresenceIs::named().into_iter().map(|(_, presence)| MemberIs {
        job: text("worker"),
        task: 3,
        presence,
        silent_ms: 4,
        tokens: List::of([(9, 5), (10, 1)]).expect("two fit"),
        step_us: None,
    });
    let status = StatusIs {
        members: List::of(members).expect("the list is within its limit"),
        absent: List::of([TaskIs { job: text("chief"), task: 0 }]).expect("one fits"),
        waiting: Some(Box::new(WaitIs {
            awaited: text("worker 2"),
            workers: List::of([TaskIs { job: text("worker"), task: 2 }]).expect("one fits"),
            shards: List::of([ShardId { task: 1, shard: 2 }]).expect("one fits"),
            waited_ms: 6,
        })),
        data: Some(Box::new(DataIs { name: text("mnist"), epoch: 7, begun: 9, unspent: 8 })),
        ..status()
    };
    add("StatusIs whole", status.into());
    add("Stop", Stop {}.into());
    add("Stopping", Stopping {}.into());
}

fn status() -> StatusIs {
    StatusIs {
        phase: PhaseIs::Training {},
        step: 10,
        restore_epoch: 1,
        members_count: 3,
        members: List::default(),
        absent_count: 1,
        absent: List::default(),
        waiting: None,
        data: None,
    }
}

fn ring_part() -> RingPart {
    RingPart { pass: 3, offset: 1 << 18 }
}

/// Adds the kinds that may have a body, once without a body checksum and once with one.
fn with_bodies(list: &mut Vec<Sample>) {
    let digest = filled(0xd0);
    let messages: [Message; 16] = [
        Declare { digest }.into(),
        CatalogueIs { digest }.into(),
        Save {}.into(),
        ShardSaved {}.into(),
        part().into(),
        encoded().into(),
        Pulled { version: 7, gradients: 5, offset: 4096, last: true }.into(),
        pulled_encoded().into(),
        Described { bytes: 4090 }.into(),
        function_call().into(),
        InputPart { call: 31, offset: 1 << 20 }.into(),
        CallEnded { outcome: CallOutcome::named().swap_remove(0).1 }.into(),
        OutputPart { offset: 1 << 20 }.into(),
        Fetched { is: value_is() }.into(),
        ring_part().into(),
        ClusterIs { index: 2 }.into(),
    ];
    for message in messages {
        for (suffix, crc) in [("body", None), ("body crc", Some(0xc0c1_c2c3))] {
            list.push(Sample {
                name: format!("{} {suffix}", message.name()),
                message: message.clone(),
                body: BodyStamp { bytes: 4096, crc },
                features: Features::NONE,
            });
        }
    }
}

fn text<const MAX: usize>(text: &str) -> Text<MAX> {
    Text::new(text).expect("the text is within its limit")
}
