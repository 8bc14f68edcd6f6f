//! Metrics of predictions.

/// Returns the area under the ROC curve: the probability that a late sample has a higher score than
/// one that is not, where equal scores count half (the rank-sum statistic of Wilcoxon, Mann and
/// Whitney). `None` if all samples are late or none is, or if a score is NaN. Sorts the scores
/// once.
///
/// # Panics
///
/// If there are more scores than samples.
pub(crate) fn auc(scores: &[f32], late: &[bool]) -> Option<f64> {
    if scores.iter().any(|score| score.is_nan()) {
        return None;
    }
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[a].total_cmp(&scores[b]));
    // Counted in halves, so that the sums are exact: for each late sample, twice the number of
    // lower samples that are not late.
    let mut below = 0_u64;
    let mut all_late = 0_u64;
    let mut wins = 0_u64;
    for tied in order.chunk_by(|&a, &b| scores[a] == scores[b]) {
        let tied_late = tied.iter().filter(|&&sample| late[sample]).count() as u64;
        let tied_not = tied.len() as u64 - tied_late;
        wins += tied_late * (2 * below + tied_not);
        below += tied_not;
        all_late += tied_late;
    }
    let pairs = 2 * below * all_late;
    (pairs > 0).then(|| wins as f64 / pairs as f64)
}

/// Returns the mean cross entropy of the labels under the probabilities of the logits; NaN for no
/// samples. A model that predicts the same for all samples reaches at best the entropy of their
/// labels.
pub(crate) fn log_loss(logits: &[f32], late: &[bool]) -> f64 {
    let sum: f64 = logits.iter().zip(late).map(|(&logit, &late)| cross_entropy(logit, late)).sum();
    sum / logits.len() as f64
}

/// Returns the cross entropy of one sample (natural logarithm).
pub(crate) fn cross_entropy(logit: f32, late: bool) -> f64 {
    let against = f64::from(if late { -logit } else { logit });
    // ln(1 + exp(against)) without an overflow. `max` would hide NaN.
    let above = if against < 0.0 { 0.0 } else { against };
    above + (-against.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix64;

    /// Computes the AUC by its definition, over all pairs.
    fn counted(scores: &[f32], late: &[bool]) -> Option<f64> {
        let mut wins = 0.0;
        let mut pairs = 0.0;
        for (high, _) in scores.iter().zip(late).filter(|(_, late)| **late) {
            for (low, _) in scores.iter().zip(late).filter(|(_, late)| !**late) {
                pairs += 1.0;
                wins += f64::from(u8::from(high > low)) + 0.5 * f64::from(u8::from(high == low));
            }
        }
        (pairs > 0.0).then(|| wins / pairs)
    }

    #[test]
    fn the_area_is_the_share_of_pairs_in_order() {
        let mut random = SplitMix64::new(3);
        let mut whole = 0;
        for _ in 0..500 {
            let count = random.below(40);
            // Few distinct scores make many ties.
            let different = 1 + random.below(30);
            let scores: Vec<f32> =
                (0..count).map(|_| random.below(different) as f32 - 7.0).collect();
            let late: Vec<bool> = (0..count).map(|_| random.below(3) == 0).collect();
            let found = auc(&scores, &late);
            let expected = counted(&scores, &late);
            assert_eq!(found.is_some(), expected.is_some());
            if let (Some(found), Some(expected)) = (found, expected) {
                assert!((found - expected).abs() < 1e-12, "{found} {expected}");
                whole += 1;
            }
        }
        assert!(whole > 400, "{whole}");
    }

    #[test]
    fn known_orders_have_their_area() {
        let late = [false, true, false, true];
        assert_eq!(auc(&[0.0, 1.0, 0.5, 2.0], &late), Some(1.0));
        assert_eq!(auc(&[2.0, 0.0, 1.0, 0.5], &late), Some(0.0));
        assert_eq!(auc(&[0.0; 4], &late), Some(0.5));
        // Zeros of either sign are equal.
        assert_eq!(auc(&[0.0, -0.0], &late[..2]), Some(0.5));
        assert_eq!(auc(&[0.0, 1.0, f32::NAN, 2.0], &late), None);
        assert_eq!(auc(&[1.0, 2.0], &[true, true]), None);
        assert_eq!(auc(&[], &[]), None);
    }

    #[test]
    fn known_probabilities_have_their_loss() {
        assert!((log_loss(&[0.0, 0.0], &[true, false]) - 2f64.ln()).abs() < 1e-12);
        // Probabilities of 3/4 and 1/4, both with the label "late".
        let logit = 3f32.ln();
        let expected = -(0.75f64.ln() + 0.25f64.ln()) / 2.0;
        assert!((log_loss(&[logit, -logit], &[true, true]) - expected).abs() < 1e-7);
        assert_eq!((cross_entropy(1e30, true), cross_entropy(-1e4, true)), (0.0, 1e4));
        assert!(cross_entropy(f32::NAN, false).is_nan());
        assert!(log_loss(&[], &[]).is_nan());
    }
}
