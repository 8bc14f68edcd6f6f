//! Tests of the decisions about a push on two shards.

use pushpull_common::ids::TokenId;

use super::push::PushShare;
use super::*;
use crate::session::ReadPoint;

const OWNER: ShardId = ShardId { task: 0, shard: 0 };
const OTHER: ShardId = ShardId { task: 1, shard: 0 };

/// A complete gradient with these shares on the step owner and another shard; a share that is not
/// settled may be whole.
fn push(synchronous: bool, shares: [(SharePhase, bool); 2]) -> PendingPush {
    let share = |(link, (phase, whole))| PushShare { link, phase, whole, ..PushShare::default() };
    PendingPush {
        effect: None,
        sequence: Sequence(1),
        operation: Operation::Gradient {},
        synchronous,
        follows_owner: !synchronous,
        grant: Some(Grant {
            token: TokenId(5),
            generation: 1,
            step: GlobalStep(0),
            push_slot: 0,
            samples: None,
            ahead: None,
        }),
        read: ReadPoint::default(),
        shares: shares.into_iter().enumerate().map(share).collect(),
        complete: true,
    }
}

fn links() -> SessionLinks {
    let now = Instant::now();
    let mut links = SessionLinks::new(OWNER, 1);
    for shard in [OWNER, OTHER] {
        links.to(now, shard);
    }
    links
}

fn settled(outcome: Outcome) -> (SharePhase, bool) {
    (SharePhase::Settled(Ok(outcome)), true)
}

fn applied() -> (SharePhase, bool) {
    settled(Outcome::Applied { step: GlobalStep(1), staleness: 0, version: 1 })
}

fn stale() -> (SharePhase, bool) {
    settled(Outcome::Stale { current: GlobalStep(9) })
}

fn refusal() -> (SharePhase, bool) {
    (SharePhase::Settled(Err(Refusal::Stopping {})), false)
}

#[test]
fn an_asynchronous_push_is_decided_by_all_shards_or_by_the_owners_rejection() {
    let sending = (SharePhase::Sending, false);
    let sent = (SharePhase::Sent, true);
    let table = [
        ([applied(), applied()], true),
        ([applied(), sent.clone()], false),
        ([sent.clone(), applied()], false),
        ([stale(), sending.clone()], true),
        // The other shard may have counted the push.
        ([stale(), sent.clone()], false),
        ([refusal(), sending], true),
        ([applied(), refusal()], true),
    ];
    for (shares, decided) in table {
        let push = push(false, shares);
        assert_eq!(push.is_decided(Some(0)), decided, "{push:?}");
    }
    let incomplete = PendingPush { complete: false, ..push(false, [applied(), applied()]) };
    assert!(!incomplete.is_decided(Some(0)), "more parts may come");
}

#[test]
fn a_synchronous_push_is_decided_by_the_owner_or_by_a_refusal() {
    let sent = (SharePhase::Sent, true);
    let held = settled(Outcome::Held {});
    let accepted = settled(Outcome::Accepted { step: GlobalStep(3) });
    let table = [
        ([accepted, sent.clone()], true),
        ([stale(), sent.clone()], true),
        ([sent.clone(), held], false),
        ([sent.clone(), refusal()], true),
        ([sent.clone(), sent], false),
    ];
    for (shares, decided) in table {
        let push = push(true, shares);
        assert_eq!(push.is_decided(Some(0)), decided, "{push:?}");
    }
}

#[test]
fn the_last_part_goes_ahead_of_the_owner_only_if_the_token_is_newer_than_the_connection() {
    let sending = (SharePhase::Sending, false);
    let sent = (SharePhase::Sent, true);
    let mut links = links();
    let open = push(false, [sent.clone(), sending.clone()]);
    assert!(open.may_complete_on(0, &links), "the owner decides first");
    for (granted_since, may) in [(None, false), (Some(5), true), (Some(6), false)] {
        links[1].granted_since = granted_since.map(TokenId);
        assert_eq!(open.may_complete_on(1, &links), may, "{granted_since:?}");
        let after = |owner| push(false, [owner, sending.clone()]).may_complete_on(1, &links);
        assert_eq!((after(applied()), after(stale())), (true, false));
        let whole = push(false, [sent.clone(), sent.clone()]);
        assert!(whole.may_complete_on(1, &links), "the shard may have applied it already");
        assert!(push(true, [sent.clone(), sending.clone()]).may_complete_on(1, &links));
    }
    links.owner_first = true;
    links[1].granted_since = Some(TokenId(5));
    assert!(!open.may_complete_on(1, &links), "the owner may reject the gradient as stale");
}

#[test]
fn a_push_is_withdrawn_only_while_no_shard_can_hold_it_whole() {
    let now = Instant::now();
    let mut links = links();
    let mut pushes = PendingPushes::new();
    let mut withdraw = |shares| {
        pushes.pending.insert(Sequence(1), push(false, shares));
        let grant = pushes.withdraw(now, Sequence(1), &mut links);
        (grant.map(|grant| grant.token.0), pushes.pending.contains_key(&Sequence(1)))
    };
    let sending = (SharePhase::Sending, false);
    let sent = (SharePhase::Sent, true);
    assert_eq!(withdraw([sending.clone(), sending.clone()]), (Some(5), false));
    assert_eq!(withdraw([sending.clone(), refusal()]), (Some(5), false));
    assert_eq!(withdraw([sending.clone(), sent]), (None, true));
    assert_eq!(withdraw([sending, applied()]), (None, true));
}

#[test]
fn the_window_is_full_when_the_oldest_pending_push_is_too_far_behind() {
    let mut pushes = PendingPushes::new();
    assert!(!pushes.window_is_full());
    pushes.pending.insert(Sequence(1), push(false, [applied(), (SharePhase::Sent, true)]));
    for next in 2..=WINDOW + 1 {
        pushes.next_sequence = next;
        assert_eq!(pushes.window_is_full(), next == WINDOW + 1, "{next}");
    }
}
