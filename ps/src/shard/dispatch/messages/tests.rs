use pushpull_common::ids::{ClientEpoch, Incarnation, RestoreEpoch, Sequence, ShardId, TokenId};
use pushpull_common::protocol::message::{
    self, Collective, PushPart, PushShared, Reserved, RingEnd, RingJoin, RingOperation, Selection,
    SharedRange,
};
use pushpull_common::protocol::wire::{List, Text};

use super::*;

const ROLES: [Role; 8] = [
    Role::Worker {},
    Role::Chief {},
    Role::Reader {},
    Role::Peer {},
    Role::Admin {},
    Role::Client {},
    Role::Rank {},
    Role::Task {},
];

/// The roles that may send a message, each as a letter (F calls functions, N is a rank, T asks a rendezvous), and then
/// the other rights.
fn rights(message: impl Into<Message>) -> String {
    let rights = MessageRights::of(&message.into());
    let roles =
        ROLES.iter().zip("WCRPAFNT".chars()).filter(|(role, _)| rights.senders.contains(**role));
    let mut text: String = roles.map(|(_, letter)| letter).collect();
    let others = [
        (rights.reads, " reads"),
        (rights.needs_lease, " lease"),
        (rights.acts_as_chief, " chief"),
    ];
    text.extend(others.into_iter().filter(|(has, _)| *has).map(|(_, name)| name));
    text
}

fn part(operation: Operation) -> PushPart {
    let token = TokenId(1);
    let whole = None;
    let read = None;
    PushPart { operation, token, generation: 1, push_slot: 1, offset: 0, whole, next: false, read }
}

fn shared(operation: Operation) -> PushShared {
    let PushPart { token, generation, push_slot, whole, next, read, .. } = part(operation);
    let ranges = List::of(std::iter::empty::<SharedRange>()).unwrap();
    PushShared { operation, token, generation, push_slot, whole, next, read, ranges }
}

#[test]
fn everybody_reads() {
    assert_eq!(rights(message::Heartbeat {}), "WCRPA reads");
    assert_eq!(rights(message::Pull { selection: Selection::All {} }), "WCRP reads");
    assert_eq!(rights(message::FetchCatalogue {}), "WCRP reads");
    assert_eq!(rights(message::AwaitReady {}), "WCRP");
    assert_eq!(rights(message::ShareValues { wants: 1 }), "WCR reads");
}

#[test]
fn members_train_under_a_lease() {
    assert_eq!(rights(message::TokenRequest { newest: TokenId(0) }), "WC lease");
    assert_eq!(rights(message::Reserve {}), "WC lease");
    assert_eq!(rights(message::SharePushBuffer {}), "WC lease");
    for operation in [Operation::Gradient {}, Operation::AssignAdd {}] {
        assert_eq!(rights(part(operation)), "WC lease");
        assert_eq!(rights(shared(operation)), "WC lease");
    }
    assert_eq!(rights(message::ReturnToken { token: TokenId(1), generation: 1 }), "WC");
    assert_eq!(rights(message::Withdraw {}), "WC");
    assert_eq!(rights(message::OutcomeQuery {}), "WC");
    assert_eq!(rights(message::Leave {}), "WC reads");
}

#[test]
fn a_chief_declares_and_assigns_first_values_as_the_chief() {
    assert_eq!(rights(part(Operation::Assign {})), "WC lease chief");
    assert_eq!(rights(shared(Operation::Assign {})), "WC lease chief");
    assert_eq!(rights(message::Declare { digest: [0; 32] }), "C chief");
    assert_eq!(rights(message::Initialize { epoch: RestoreEpoch(1) }), "C chief");
    assert_eq!(rights(message::FindCheckpoint {}), "C chief");
    assert_eq!(rights(message::PassedOverQuery {}), "C chief");
    assert_eq!(rights(message::Save {}), "CA chief");
    assert_eq!(rights(message::Finish {}), "CA chief");
}

#[test]
fn shards_report_steps_and_nobody_answers_for_a_server() {
    let shard = ShardId { task: 0, shard: 1 };
    assert_eq!(rights(message::StepApplied { shard }), "P");
    assert_eq!(rights(message::Recalled { token: TokenId(1), shard, applied: true }), "P");
    let client = ClientEpoch(1);
    let oldest = Sequence(1);
    let applied = List::default();
    let audited = message::PushesAudited { client, shard, ended: true, oldest, applied };
    assert_eq!(rights(audited), "P");
    assert_eq!(rights(message::HeartbeatAnswer {}), "");
    assert_eq!(rights(Reserved { push_slot: 1 }), "");
}

#[test]
fn rings_are_no_business_of_a_shard() {
    let operation = RingOperation {
        collective: Collective::Barrier {},
        elements: 1,
        count: 0,
        name: Text::default(),
        codec: None,
    };
    let join = RingJoin {
        id: Text::default(),
        index: None,
        size: 2,
        host: Text::default(),
        addresses: List::default(),
        epoch: 0,
        gone: List::default(),
    };
    let rank = 0;
    let epoch = 1;
    let size = 2;
    let member = message::RingMember {
        rank,
        index: 0,
        process: Incarnation(1),
        host: Text::default(),
        addresses: List::default(),
    };
    let messages: [Message; 12] = [
        join.into(),
        message::RingWaits { came: 1, size, missing: List::default() }.into(),
        member.into(),
        message::RingFormed { rendezvous: 1, epoch, rank, size, lease_ms: 1, serving: None }.into(),
        message::RingJoiners { count: 1 }.into(),
        message::RingOver { epoch, end: RingEnd::Regrouped {} }.into(),
        message::RingLink { rendezvous: 1, epoch, rank, to: Incarnation(1) }.into(),
        message::RingLinked { memory: 0 }.into(),
        operation.into(),
        message::RingPart { pass: 0, offset: 0 }.into(),
        message::RingEntered { epoch }.into(),
        message::RingMoved { addresses: List::default() }.into(),
    ];
    let kinds: Vec<u16> = messages.iter().map(Message::kind).collect();
    assert_eq!(kinds, (96..=107).collect::<Vec<u16>>());
    for message in messages {
        let name = message.name();
        assert_eq!(rights(message), "", "{name}");
    }
}
