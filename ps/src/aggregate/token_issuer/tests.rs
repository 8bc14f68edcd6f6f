use pushpull_store::planted::PlantedBugs;

use super::*;
use crate::aggregate::step_rule::StepRule;

const A: ClientKey = ClientKey(0);
const B: ClientKey = ClientKey(1);
const EPOCH: ClientEpoch = ClientEpoch(3);

fn issuer(last_step: Option<u64>) -> TokenIssuer {
    TokenIssuer::Asynchronous(Box::new(AsynchronousTokens::new(
        last_step,
        None,
        None,
        PlantedBugs::default(),
    )))
}

/// Returns the issuer of steps of two gradients from two replicas, which have joined.
fn synchronous_issuer() -> TokenIssuer {
    let rule = StepRule {
        aggregate: 2,
        total: 2,
        floor: 1,
        ordered: false,
        push_slots: 4,
        last_step: None,
        clip: None,
    };
    let mut coordinator = StepCoordinator::new(rule, 1, PlantedBugs::default());
    coordinator.join(A, 0);
    coordinator.join(B, 1);
    TokenIssuer::Synchronous(Box::new(coordinator))
}

fn asynchronous(owner: &mut TokenIssuer) -> &mut AsynchronousTokens {
    owner.asynchronous_tokens_mut().unwrap()
}

fn granted(request: TokenResponse) -> Issued {
    match request {
        TokenResponse::Granted(issued) => issued,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_last_step_is_exact_because_outstanding_tokens_are_promised() {
    let now = Instant::now();
    let mut owner = issuer(Some(3));
    let first = granted(owner.request(A, EPOCH, now));
    let second = granted(owner.request(B, EPOCH, now));
    assert_eq!(asynchronous(&mut owner).spend(first.token, GlobalStep(0)), 0);
    granted(owner.request(A, EPOCH, now));
    assert_eq!(owner.request(A, EPOCH, now), TokenResponse::Wait);
    assert_eq!(
        asynchronous(&mut owner).spend(second.token, GlobalStep(0)),
        1,
        "one step passed since it was granted"
    );
    owner.check_invariants();
    // A is lost, so its token's step can be promised to another client.
    assert_eq!(owner.drop_client(A, false, |_| false), 1);
    let last = granted(owner.request(B, EPOCH, now));
    assert!(
        !owner.ledger().holds(A, last.token, last.generation)
            && owner.ledger().holds(B, last.token, last.generation)
    );
    asynchronous(&mut owner).spend(last.token, last.step);
    assert_eq!(owner.request(A, EPOCH, now), TokenResponse::Ended(EndReason::LastStep {}));
    assert_eq!(owner.step(), GlobalStep(3));
    owner.check_invariants();
}

#[test]
fn an_expired_token_is_taken_back_and_no_longer_held() {
    let start = Instant::now();
    let mut owner = issuer(Some(1));
    let timeout = Some(Duration::from_secs(10));
    let issued = granted(owner.request(A, EPOCH, start));
    let later = start + Duration::from_secs(9);
    assert_eq!(owner.expire(later, timeout, |_| false), 0);
    let later = start + Duration::from_secs(10);
    assert_eq!(owner.expire(later, timeout, |token| token == issued.token), 0, "its push is whole");
    assert_eq!(owner.expire(later, timeout, |_| false), 1);
    assert!(!owner.ledger().holds(A, issued.token, issued.generation));
    assert_ne!(
        granted(owner.request(B, EPOCH, later)).token,
        issued.token,
        "token numbers are not reused"
    );
}

#[test]
fn finish_ends_grants_but_not_outstanding_tokens() {
    let now = Instant::now();
    let mut owner = issuer(None);
    let issued = granted(owner.request(A, EPOCH, now));
    owner.finish();
    assert_eq!(owner.request(B, EPOCH, now), TokenResponse::Ended(EndReason::Finished {}));
    assert!(owner.ledger().holds(A, issued.token, issued.generation));
    assert!(!owner.give_back(B, issued.token, issued.generation));
    assert_eq!(asynchronous(&mut owner).spend(issued.token, issued.step), 0);
}

#[test]
fn a_lost_replica_loses_the_tokens_of_pushes_that_are_not_admitted() {
    let now = Instant::now();
    let mut owner = synchronous_issuer();
    let [a, b] = [A, B].map(|client| granted(owner.request(client, EPOCH, now)));
    assert_eq!(owner.request(A, EPOCH, now), TokenResponse::Wait, "it has its share");
    owner.check_invariants();
    assert!(owner.coordinator_mut().unwrap().held(0, a.token.0, 0.0.into()));
    assert!(!owner.ledger().holds(A, a.token, a.generation), "its push is admitted");
    // The push of B is whole here, but no other push of the step can be told from it.
    assert_eq!(owner.drop_client(B, false, |token| token == b.token), 0);
    assert_eq!(owner.ledger().iter().count(), 0, "the token ends all the same");
    owner.check_invariants();
}

#[test]
fn training_stays_finished_in_either_mode_until_a_checkpoint_is_restored() {
    let now = Instant::now();
    for mut owner in [issuer(None), synchronous_issuer()] {
        granted(owner.request(A, EPOCH, now));
        owner.finish();
        owner.forget_tokens();
        assert_eq!(owner.request(B, EPOCH, now), TokenResponse::Ended(EndReason::Finished {}));
        owner.roll_back(GlobalStep(0));
        granted(owner.request(B, EPOCH, now));
        owner.check_invariants();
    }
}
